"""How many files somebody reads to follow one step: through `Buffer.submit`, and through forming a mini-batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.ledger.state import VersionHistory
from service.handoff.verbs import Receipt
from service.types import TrajectoryEnd, TrajectoryId
from tests.pure.buffer.world import START, World, step

ROOT = Path(__file__).parents[3]
MAX_FILES = 12


def files_on_the_way(run: Callable[[], Any]) -> list[str]:
    """The files of service/ of which some function is entered while `run` runs; generated code has no file."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            entered.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    inside = [Path(name) for name in entered if name.startswith(str(ROOT / "service"))]
    return sorted({str(path.relative_to(ROOT)) for path in inside})


def whole_trajectories(world: World) -> list[bytes]:
    """The messages of one group, each with a whole trajectory of three steps that continue one another."""
    work = world.generator.claimed()
    messages = []
    for sample in work.samples:
        of = TrajectoryId(work.group_id, sample)
        steps = [step(of, work.prompt_uid, index) for index in range(3)]
        end = TrajectoryEnd(of, work.prompt_uid, 3, "stop", float(sample))
        messages.append(world.generator.message(steps, [end]))
    return messages


def test_a_message_is_followed_through_few_files(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, last = whole_trajectories(world)
    assert isinstance(world.buffer.submit(first), Receipt)
    answers: list[Any] = []
    files = files_on_the_way(lambda: answers.append(world.buffer.submit(last)))
    assert isinstance(answers[0], Receipt) and world.buffer.status().groups["complete"] == 1
    assert len(files) <= MAX_FILES, "\n".join(files)


def test_a_mini_batch_is_formed_in_few_files(tmp_path: Path) -> None:
    world = World(tmp_path)
    for message in [*whole_trajectories(world), *whole_trajectories(world)]:
        assert isinstance(world.buffer.submit(message), Receipt)
    groups = [world.buffer.complete_group(group_id) for group_id in range(2)]
    history, settings = VersionHistory(START), BatchSettings(ranks=1, token_budget=256, max_staleness=8)
    files = files_on_the_way(lambda: form_mini_batch(1, groups, history, settings))
    assert len(files) <= MAX_FILES, "\n".join(files)
