"""A trajectory whose parts contradict each other is refused, in one message or in several."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.handoff.ledger import events
from service.handoff.ledger.ledger import Ledger
from service.handoff.ledger.state import MESSAGES_REMEMBERED, State
from service.handoff.steps.values import Role, packed_roles
from service.handoff.verbs import Receipt
from service.types import Extension, Refusal, RefusalReason, Sender, Step, TrajectoryEnd, TrajectoryId
from tests.pure.buffer.world import World, step

Whole = tuple[list[Step], list[TrajectoryEnd]]


def first_step(**changes: Any) -> Callable[[list[Step], TrajectoryEnd], Whole]:
    """The first step comes once more, with other values."""
    return lambda steps, end: ([*steps, replace(steps[0], **changes)], [end])


def other_end(**changes: Any) -> Callable[[list[Step], TrajectoryEnd], Whole]:
    return lambda steps, end: (steps, [end, end._replace(**changes)])


def second_extends(extends: Extension) -> Callable[[list[Step], TrajectoryEnd], Whole]:
    return lambda steps, end: ([steps[0], replace(steps[1], extends=extends), steps[2]], [end])


def missing_logprobs(steps: list[Step], end: TrajectoryEnd) -> Whole:
    for made in steps[:2]:
        assert made.logprobs is not None
        made.logprobs[0] = np.nan
    return steps, [end]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda steps, end: (steps, [end._replace(n_steps=2)]), RefusalReason.STEP_ORDER),
        (other_end(reward=0.5), RefusalReason.CONFLICT),
        (other_end(roles=packed_roles([Role.AUX] * 3)), RefusalReason.CONFLICT),
        (first_step(reward=0.7), RefusalReason.CONFLICT),
        (first_step(prompt_ids=np.array([10, 11, 499], np.int32)), RefusalReason.CONFLICT),
        (second_extends(Extension(0, 5, 7)), RefusalReason.PREFIX),
        (second_extends(Extension(0, 9, 7)), RefusalReason.PREFIX),
        (missing_logprobs, RefusalReason.LOGPROB),
    ],
)
def test_a_trajectory_that_contradicts_itself_is_refused_in_one_message_or_in_two(
    tmp_path: Path, change: Callable[[list[Step], TrajectoryEnd], Whole], reason: RefusalReason
) -> None:
    for together in (True, False):
        world = World(tmp_path / str(together))
        work = world.generator.claimed()
        of = TrajectoryId(work.group_id, 0)
        made = [step(of, work.prompt_uid, index) for index in range(3)]
        steps, ends = change(made, TrajectoryEnd(of, work.prompt_uid, 3, "stop", 1.0))
        if not together:
            assert isinstance(world.generator.send(steps[:2]), Receipt)
        answer = world.generator.send(steps if together else steps[2:], ends)
        assert isinstance(answer, Refusal) and answer.reason is reason


def test_steps_count_once_in_whatever_order_and_however_often_they_come(tmp_path: Path) -> None:
    world = World(tmp_path)
    work = world.generator.claimed()
    for sample in work.samples:
        of = TrajectoryId(work.group_id, sample)
        steps = [step(of, work.prompt_uid, index) for index in range(3)]
        ends = [TrajectoryEnd(of, work.prompt_uid, 3, "stop", 1.0)]
        for sent in ([steps[2]], [steps[0], steps[2]], [steps[1]]):
            assert isinstance(world.generator.send(sent, ends), Receipt)
    status = world.buffer.status()
    assert (status.groups["complete"], status.accepted_tokens) == (1, 12)


@pytest.mark.parametrize("crash", [False, True])
def test_routed_experts_of_another_shape_are_refused_for_they_fit_into_no_batch(tmp_path: Path, crash: bool) -> None:
    world = World(tmp_path)
    work = world.generator.claimed()
    one, other = (step(TrajectoryId(work.group_id, sample), work.prompt_uid, 0) for sample in work.samples)
    assert isinstance(world.generator.send([replace(one, routed_experts=np.full((5, 2, 2), 3, np.int16))]), Receipt)
    if crash:
        world.crash()
    answer = world.generator.send([replace(other, routed_experts=np.zeros((5, 3, 2), np.int16))])
    assert isinstance(answer, Refusal) and answer.reason == RefusalReason.LENGTH_MISMATCH


def test_gaps_in_a_generators_message_numbers_take_bounded_memory() -> None:
    ledger = Ledger(State(n_samples=1))
    ledger.apply(events.Joined("generator", "g", 1), now=0.0)
    for number in range(0, 4000, 2):  # every other message was refused
        ledger.accept(Sender("g", 1, number), [], routing=None, now=0.0)
    assert len(ledger.state.generators["g"].received) <= MESSAGES_REMEMBERED
    assert [ledger.received(Sender("g", 1, number)) for number in (3998, 3997, 2)] == [True, False, False]
