from collections.abc import Iterator
from pathlib import Path

import pytest

from service.cli.parser import main
from service.clock import SystemClock
from service.config import Config, resolved_yaml
from service.errors import UserError
from service.handoff.journal.journal import Frame, Journal, frames_in
from service.handoff.ledger import events
from service.handoff.steps.wire import encode_mini_batch
from service.run import recorded
from service.types import PolicyVersion
from tests.pure.buffer.world import World, config


def settings(record: bool = True) -> Config:
    return config(buffer={"record": record}, trainer={"checkpoint_every": 2}, algorithm={"filter_zero_variance": True})


def a_run(world: World, steps: int) -> dict[int, bytes]:
    """Train with restarts and filtered groups; returns every mini-batch's bytes by step."""
    trained = {}
    for n in range(steps):
        version = PolicyVersion(world.trainer_incarnation, n)
        world.generator.finish(world.generator.claimed(version), version, rewards=(1.0, 1.0))
        for _ in range(2):
            world.generator.claimed(version)
            world.later(11)
            work = world.generator.claimed(version)
            assert work.attempts == (1, 1)
            world.generator.finish(work, version, turns=1 + n % 3)
        batch = world.batch()
        trained[n + 1] = encode_mini_batch(batch)
        world.train()
        if n % 2:
            world.buffer.covered(n + 1)
        world.journal.sync()
    return trained


@pytest.mark.parametrize("segment_bytes", [1 << 20, 10_000])
def test_every_mini_batch_of_a_recorded_run_is_formed_again_bit_by_bit(tmp_path: Path, segment_bytes: int) -> None:
    world = World(tmp_path, settings(), segment_bytes=segment_bytes)
    trained = a_run(world, steps=6)
    assert (tmp_path / "reclaimed").is_dir() == (segment_bytes < 1 << 20)
    for step, batch in trained.items():
        assert encode_mini_batch(world.replayed(step)) == batch


def test_replay_gives_the_last_try_of_a_step_that_was_done_again(tmp_path: Path) -> None:
    world = World(tmp_path, settings())
    first = a_run(world, steps=3)
    world.trainer_incarnation = world.buffer.join("trainer", "trainer", step=2)
    again = world.batch()
    world.train()
    world.journal.sync()
    found = world.replayed(3)
    assert encode_mini_batch(found) == encode_mini_batch(again) != first[3]


def test_a_frame_that_was_synced_and_is_damaged_ends_no_replay_in_silence(tmp_path: Path) -> None:
    """Otherwise the first try of a step would be given for the last one."""
    world = World(tmp_path, settings())
    a_run(world, steps=3)
    (segment,) = tmp_path.glob("*.journal")
    middle = [*frames_in(segment)][-2].position
    world.trainer_incarnation = world.buffer.join("trainer", "trainer", step=2)
    world.batch()
    world.train()
    world.journal.sync()
    world.buffer.drain("a frame after the sync")
    world.journal.sync()
    data = bytearray(segment.read_bytes())
    data[middle + 80] ^= 1
    segment.write_bytes(data)
    with pytest.raises(UserError, match=rf"damaged at byte {middle} "):
        world.replayed(3)


def test_a_segment_that_is_a_link_to_a_missing_file_or_a_folder_ends_no_replay_in_silence(tmp_path: Path) -> None:
    world = World(tmp_path, settings(), segment_bytes=10_000)
    a_run(world, steps=3)
    world.trainer_incarnation = world.buffer.join("trainer", "trainer", step=2)
    world.batch()
    world.train()
    world.journal.sync()
    last = max(tmp_path.glob("*.journal"))
    last.rename(tmp_path / "elsewhere")
    last.symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=f"{last.name} cannot be opened"):
        world.replayed(3)
    last.unlink()
    last.mkdir()
    with pytest.raises(UserError, match=f"{last.name}: cannot be read: Is a directory"):
        world.replayed(3)


def test_replay_changes_nothing_in_the_folder(tmp_path: Path) -> None:
    world = World(tmp_path, settings())
    a_run(world, steps=1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    world.replayed(1)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_replay_beside_a_running_run_follows_segments_that_move_and_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, settings(), segment_bytes=10_000)
    trained = a_run(world, steps=3)
    live = {path.name for path in tmp_path.glob("*.journal")}
    read = list[Path]()

    def frames_meanwhile(path: Path) -> Iterator[Frame]:
        """As `frames_in`; once a segment has been read, the run moves those that were live to `reclaimed/`."""
        if read:
            while live & {path.name for path in tmp_path.glob("*.journal")}:
                world.play(2, world.buffer.version)
                world.train()
                world.buffer.covered(world.buffer.version.step)
                world.journal.sync()
        yield from frames_in(path)
        read.append(path)

    monkeypatch.setattr(recorded, "frames_in", frames_meanwhile)
    assert encode_mini_batch(world.replayed(1)) == trained[1]
    assert all(path.stat().st_size for path in tmp_path.rglob("*.journal"))
    world.crash()


def test_a_step_that_was_never_made_is_one_clear_line(tmp_path: Path) -> None:
    world = World(tmp_path, settings())
    a_run(world, steps=1)
    with pytest.raises(UserError, match="no optimizer step 9"):
        world.replayed(9)


def test_a_run_that_was_not_recorded_says_what_to_set(tmp_path: Path) -> None:
    world = World(tmp_path, settings(record=False), segment_bytes=10_000)
    a_run(world, steps=6)
    with pytest.raises(UserError, match="record: true"):
        world.replayed(6)


UNKNOWN = 99
"""A kind of frames that no version of Baton writes."""


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (events.STEPS, events.EVENT, "ValidationError: Expected `array`, got `int`"),
        (events.STEPS, UNKNOWN, "ValueError: a group that is issued cannot become filtered"),
        (events.EVENT, events.STEPS, "position 0 of the journal was accepted, but is refused"),
    ],
)
def test_frames_that_no_run_wrote_and_files_of_other_names_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: int, new: int, why: str
) -> None:
    """Every frame is whole, and those of one kind are marked as another."""
    world = World(tmp_path / "run/journal", settings())
    a_run(world, steps=1)
    (tmp_path / "run/config.yaml").write_text(resolved_yaml(world.settings))
    (segment,) = (tmp_path / "run/journal").glob("*.journal")
    frames = [*frames_in(segment)]
    segment.unlink()
    damaged = Journal(segment.parent, SystemClock())
    assert [*damaged.replay()] == []
    for frame in frames:
        damaged.append(new if frame.kind == old else frame.kind, frame.payload)
    damaged.sync()
    damaged.close()
    assert main(["replay", str(tmp_path / "run"), "--step", "1"]) == 2
    assert why in (said := capsys.readouterr().err) and said.count("\n") == 1
    segment.rename(segment.with_name("copy.journal"))
    assert main(["replay", str(tmp_path / "run"), "--step", "1"]) == 2
    assert "no segment begins at position 0, where copy.journal comes next" in capsys.readouterr().err


def test_the_command_prints_returns_and_facts_and_writes_the_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path / "journal", settings())
    trained = a_run(world, steps=2)
    (tmp_path / "config.yaml").write_text(resolved_yaml(world.settings))
    out = tmp_path / "batch"
    assert main(["replay", str(tmp_path), "--step", "2", "--out", str(out)]) == 0
    assert out.read_bytes() == trained[2]
    printed = capsys.readouterr().out
    assert "step 2: 2 groups, 4 trajectories" in printed
    assert "returns 1 0  advantages +0.71 -0.71" in printed
    assert "reward/avg_raw_reward" in printed


def test_a_folder_without_a_run_is_wrong_input(tmp_path: Path) -> None:
    assert main(["replay", str(tmp_path), "--step", "1"]) == 2
