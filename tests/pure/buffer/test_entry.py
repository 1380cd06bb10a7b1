"""In whatever order steps come, and however often, the buffer keeps the same."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.columns import digest
from service.handoff.ledger import events
from service.handoff.ledger.ledger import Ledger
from service.handoff.ledger.state import MESSAGES_REMEMBERED, State
from service.handoff.prefixes.merge import merge
from service.handoff.prefixes.sharing import shared_form
from service.handoff.steps.tables import row_objects
from service.handoff.steps.values import Role, packed_roles
from service.handoff.verbs import Receipt
from service.types import Extension, Int32s, Refusal, RefusalReason, Sender, Step, TrajectoryEnd, TrajectoryId
from tests.invariant import fingerprint
from tests.pure.buffer.world import START, World, config
from tests.pure.handoff.test_properties import episodes, facts


def whole(of: Step) -> Int32s:
    return np.concatenate((of.prompt_ids, of.response_ids))


def sampled(made: list[Step], of: TrajectoryId, uid: str) -> list[Step]:
    """Made steps as this trajectory's, sampled by the first weights."""
    return [
        replace(s, trajectory=of, prompt_uid=uid, versions=np.full(len(s.response_ids), START.pack(), np.int64))
        for s in made
    ]


def rows(world: World, group_id: int, mode: Any) -> list[dict[str, Any]]:
    made = row_objects(merge(world.buffer.complete_group(group_id).steps, mode).rows)
    return sorted(map(facts, made), key=lambda row: (row["trajectory"], row["first_step"], row["last_step"]))


@settings(deadline=None, max_examples=40)
@given(st.lists(episodes(), min_size=2, max_size=2), st.sampled_from(["linear", "tree"]), st.data())
def test_any_order_and_any_repetition_give_the_same_rows(
    made: list[list[Step]], mode: Any, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        straight, mixed = (World(Path(folder), config(env={"max_turns": 8})) for folder in (one, other))
        work = straight.generator.claimed()
        assert mixed.generator.claimed() == work
        ids = [TrajectoryId(work.group_id, sample) for sample in work.samples]
        steps = [sampled(shared_form(episode), of, work.prompt_uid) for episode, of in zip(made, ids, strict=True)]
        ends = [TrajectoryEnd(of, work.prompt_uid, len(e), "stop", 1.0) for e, of in zip(steps, ids, strict=True)]
        for episode, end in zip(steps, ends, strict=True):
            assert isinstance(straight.generator.send(episode, [end]), Receipt)
        places = [(g, index) for g, episode in enumerate(steps) for index in range(len(episode))]
        again = data.draw(st.lists(st.sampled_from(places), max_size=4))
        for g, index in data.draw(st.permutations([*places, *again])):
            answer = mixed.generator.send([steps[g][index]])
            assert isinstance(answer, Receipt), answer
        for end in ends:
            assert isinstance(mixed.generator.send([], [end]), Receipt)
        assert rows(mixed, work.group_id, mode) == rows(straight, work.group_id, mode)
        before = fingerprint(mixed.buffer.ledger), mixed.buffer.status().n_bytes
        mixed.crash()
        assert (fingerprint(mixed.buffer.ledger), mixed.buffer.status().n_bytes) == before
        assert rows(mixed, work.group_id, mode) == rows(straight, work.group_id, mode)


def turns(of: TrajectoryId, uid: str, count: int, new: int = 40) -> list[Step]:
    """A long episode; each step continues the step before it."""
    rng, history, made, extends = np.random.default_rng(of.sample), np.zeros(0, np.int32), list[Step](), None
    for index in range(count):
        prompt, response = rng.integers(0, 500, (2, new), np.int32)
        made.append(
            Step(of, uid, index, prompt, response, np.full(new, -1, np.float32), np.ones(new, np.bool_),
                 np.full(new, START.pack(), np.int64), extends=extends)
        )  # fmt: skip
        history = np.concatenate((history, prompt, response))
        extends = Extension(index, len(history), digest(history))
    return made


def long_world(folder: Path) -> World:
    generator = {"max_input_length": 8192, "max_generate_length": 64}
    return World(
        folder, config(env={"max_turns": 60}, generator=generator, trainer={"max_tokens_per_micro_batch": 1 << 14})
    )


def test_turns_sent_all_again_with_each_new_one_are_journalled_once(tmp_path: Path) -> None:
    world = long_world(tmp_path)
    work = world.generator.claimed()
    made = turns(TrajectoryId(work.group_id, 0), work.prompt_uid, 20)
    positions = [world.buffer.status().journal_position]
    for count in range(1, len(made) + 1):
        assert isinstance(world.generator.send(made[:count]), Receipt)
        positions.append(world.buffer.status().journal_position)
    each = np.diff(positions)
    assert each[-1] <= each[1] + 64  # a frame's padding


def routed(of: Step, expert: int, dtype: type[np.generic] = np.int16) -> Step:
    return replace(of, routed_experts=np.full((len(whole(of)), 2, 2), expert, np.int16).astype(dtype))


def test_a_journal_whose_experts_are_int16_goes_on_with_bytes(tmp_path: Path) -> None:
    world = long_world(tmp_path)
    work = world.generator.claimed()
    made = turns(TrajectoryId(work.group_id, 0), work.prompt_uid, 2)
    assert isinstance(world.generator.send([routed(made[0], 3)]), Receipt)
    world.crash()
    for _ in range(2):
        assert isinstance(world.generator.send([routed(made[0], 3, np.uint8)]), Receipt), "the same step, not another"
        assert isinstance(world.generator.send([routed(made[1], -1, np.uint8)]), Receipt)
    ends = [TrajectoryEnd(TrajectoryId(work.group_id, s), work.prompt_uid, 2 - 2 * s, "stop", 1.0) for s in (0, 1)]
    assert isinstance(world.generator.send([], ends), Receipt)
    kept = world.buffer.complete_group(work.group_id).steps
    assert kept.routed_experts_N is not None and kept.routed_experts_N.dtype == np.int16
    assert np.unique(kept.routed_experts_N).tolist() == [-1, 3]


@pytest.mark.parametrize("part", ["prompt", "reference", "no reference"])
def test_a_step_that_differs_is_a_conflict(tmp_path: Path, part: str) -> None:
    world = long_world(tmp_path)
    work = world.generator.claimed()
    made = turns(TrajectoryId(work.group_id, 0), work.prompt_uid, 3)
    assert isinstance(world.generator.send(made), Receipt)
    assert isinstance(again := world.generator.send(made[2:]), Receipt) and again.duplicate
    shorter = np.concatenate((whole(made[0]), made[1].prompt_ids))
    other = {
        "prompt": replace(made[2], prompt_ids=np.append(made[2].prompt_ids[:-1], np.int32(499))),
        "reference": replace(made[2], extends=Extension(1, len(shorter), digest(shorter))),
        "no reference": replace(made[2], extends=None),
    }[part]
    answer = world.generator.send([other])
    assert isinstance(answer, Refusal) and answer.reason == RefusalReason.CONFLICT


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
        (other_end(n_steps=5), RefusalReason.CONFLICT),
        (other_end(reward=0.5), RefusalReason.CONFLICT),
        (other_end(stop_reason="length"), RefusalReason.CONFLICT),
        (other_end(roles=packed_roles([Role.AUX] * 3)), RefusalReason.CONFLICT),
        (first_step(reward=0.7), RefusalReason.CONFLICT),
        (first_step(temperature=0.7), RefusalReason.CONFLICT),
        (second_extends(Extension(0, 80, 7)), RefusalReason.PREFIX),
        (second_extends(Extension(0, 100, 7)), RefusalReason.PREFIX),
        (missing_logprobs, RefusalReason.LOGPROB),
    ],
)  # fmt: skip
def test_a_trajectory_that_contradicts_itself_is_refused_in_one_message_or_in_two(
    tmp_path: Path, change: Callable[[list[Step], TrajectoryEnd], Whole], reason: RefusalReason
) -> None:
    for together in (True, False):
        world = long_world(tmp_path / str(together))
        work = world.generator.claimed()
        of = TrajectoryId(work.group_id, 0)
        made = turns(of, work.prompt_uid, 3)
        steps, ends = change(made, TrajectoryEnd(of, work.prompt_uid, 3, "stop", 1.0))
        if not together:
            assert isinstance(world.generator.send(steps[:2]), Receipt)
        answer = world.generator.send(steps if together else steps[2:], ends)
        assert isinstance(answer, Refusal) and answer.reason is reason


@pytest.mark.parametrize("crash", [False, True])
def test_routed_experts_of_another_shape_are_refused_for_they_fit_into_no_batch(tmp_path: Path, crash: bool) -> None:
    world = long_world(tmp_path)
    work = world.generator.claimed()
    one, other = (turns(TrajectoryId(work.group_id, sample), work.prompt_uid, 1)[0] for sample in work.samples)
    assert isinstance(world.generator.send([routed(one, 3)]), Receipt)
    if crash:
        world.crash()
    wider = replace(other, routed_experts=np.zeros((len(whole(other)), 3, 2), np.int16))
    answer = world.generator.send([wider])
    assert isinstance(answer, Refusal) and answer.reason == RefusalReason.LENGTH_MISMATCH


def test_gaps_in_a_generators_message_numbers_take_bounded_memory() -> None:
    ledger = Ledger(State(n_samples=1))
    ledger.apply(events.Joined("generator", "g", 1), now=0.0)
    for number in range(0, 4000, 2):  # every other message was refused
        ledger.accept(Sender("g", 1, number), [], routing=None, now=0.0)
    assert len(ledger.state.generators["g"].received) <= MESSAGES_REMEMBERED
    assert [ledger.received(Sender("g", 1, number)) for number in (3998, 3997, 2)] == [True, False, False]
