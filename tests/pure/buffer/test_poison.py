"""Valid messages with a few numbers changed, through the whole door: none raises, and what is accepted replays."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from service.columns import select
from service.handoff.ledger.events import GroupState
from service.handoff.prefixes.merge import merge
from service.handoff.steps.tables import ends_table, steps_table
from service.handoff.steps.wire import encode
from service.handoff.verbs import Assignment, Receipt
from service.types import Ends, Refusal, Sender, Step, StepGroup, Steps, TrajectoryEnd, TrajectoryId
from tests.invariant import fingerprint
from tests.pure.buffer.world import World, config, step
from tests.pure.handoff.worlds import whole_prompts

INTEGERS = (0, 1, -1, 2, 7, 1 << 16, (1 << 31) - 1, -(1 << 31), 1 << 32, 1 << 53, 1 << 62, (1 << 63) - 1, -(1 << 63))
NUMBERS = (np.nan, np.inf, -np.inf, -0.0, 1e38, 1e-45, 1e308, 5.0)


def changed(rng: np.random.Generator, column: NDArray[Any]) -> NDArray[Any]:
    """A column with one number changed: by a little, or to an extreme."""
    column = column.copy()
    if column.size:
        at = int(rng.integers(len(column)))
        if column.dtype.kind == "b":
            column[at] = ~column[at]
        elif column.dtype.kind == "f":
            with np.errstate(over="ignore"):
                column[at] = np.float64(rng.choice(NUMBERS)).astype(column.dtype)
        elif rng.random() < 0.5:
            column[at] += column.dtype.type(1)
        else:
            column[at] = np.array(INTEGERS[rng.integers(len(INTEGERS))], np.int64).astype(column.dtype)
    return column


def mutated(rng: np.random.Generator, table: Any) -> Any:
    """A table, or one of its columns changed; also where no table could be made like that."""
    names = sorted((field.name for field in fields(table)), key=lambda name: name.endswith("_N"))
    columns = [name for name in names if isinstance(getattr(table, name), np.ndarray)]
    name = columns[rng.integers(len(columns))]
    broken = object.__new__(type(table))
    for each in names:
        value = getattr(table, each)
        object.__setattr__(broken, each, changed(rng, value) if each == name else value)
    return broken


def message(rng: np.random.Generator, world: World, work: Assignment) -> StepGroup:
    """Steps of both samples in any form and order, some twice, with or without their ends."""
    steps, ends = list[Step](), list[TrajectoryEnd]()
    group = world.buffer.ledger.state.groups[work.group_id]
    dressed, whole = work.group_id % 3 == 0, rng.random() < 0.5
    for sample, trajectory in enumerate(group.trajectories):
        of = TrajectoryId(work.group_id, sample, trajectory.attempt)
        made = [
            step(of, work.prompt_uid, index, world.buffer.version) for index in range(1 + (work.group_id + sample) % 4)
        ]
        if dressed:
            made = [replace(s, reward=float(s.index)) for s in made]
        steps += whole_prompts(made) if whole else made
        ends += [TrajectoryEnd(of, work.prompt_uid, len(made), "stop", 1.0)] * int(rng.integers(3))
    order = rng.permutation(len(steps))
    table: Steps = select(steps_table(steps), np.concatenate((order, order[: int(rng.integers(3))])))
    sender = Sender(world.generator.name, world.generator.incarnation, world.generator.sequence)
    made_ends: Ends = ends_table(ends)
    if rng.random() < 0.2:
        return StepGroup(sender, table, mutated(rng, made_ends))
    return StepGroup(sender, mutated(rng, table) if rng.random() < 0.8 else table, made_ends)


def current_work(world: World, work: Assignment | None) -> Assignment:
    """The group under way, or another one; restarted samples are claimed again."""
    groups = world.buffer.ledger.state.groups
    for group_id in [o for o, group in groups.items() if group.state is GroupState.COMPLETE]:
        merge(world.buffer.complete_group(group_id).steps, "tree")  # what was accepted makes rows
    if work is None or work.group_id not in groups or groups[work.group_id].state is GroupState.COMPLETE:
        while not isinstance(answer := world.generator.claim(world.buffer.version), Assignment):
            world.train()
        return answer
    if any(group_id == work.group_id for group_id, _ in world.buffer.ledger.unassigned):
        world.generator.claimed(world.buffer.version)
    return work


@pytest.mark.parametrize("seed", range(3))
def test_mutated_messages_never_raise_and_what_was_accepted_replays(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, config(buffer={"max_attempts": 1000, "max_staleness": 8}))
    rng, work, accepted = np.random.default_rng(seed), None, 0
    for number in range(300):
        if number % 20 == 0:  # an accepted wrong step conflicts with the right one until a restart
            world.later(11)  # beyond the step deadline
        work = current_work(world, work)
        world.generator.sequence += 1
        answer = world.buffer.submit(encode(message(rng, world, work)))
        assert isinstance(answer, Receipt | Refusal)
        accepted += isinstance(answer, Receipt)
    assert accepted > 5 and world.closes()
    before = fingerprint(world.buffer.ledger)
    world.crash()
    assert fingerprint(world.buffer.ledger) == before
