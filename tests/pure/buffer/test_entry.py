"""Full prompts and references: whatever form steps come in, and in whatever order, the buffer keeps the same."""

from __future__ import annotations

import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.columns import bytes_per_token, digest
from service.handoff.ledger import events
from service.handoff.ledger.ledger import Ledger
from service.handoff.ledger.state import MESSAGES_REMEMBERED
from service.handoff.prefixes.merge import merge
from service.handoff.steps.builder import steps_table
from service.handoff.steps.roles import Role, packed_roles
from service.handoff.steps.tables import row_objects
from service.handoff.verbs import Receipt
from service.types import Extension, Int32s, Refusal, RefusalReason, Sender, Step, TrajectoryEnd, TrajectoryId
from tests.invariant import fingerprint
from tests.pure.buffer.world import START, World, config
from tests.pure.handoff.test_properties import episodes, facts

FORMS = st.sampled_from(["full", "nearest", "first"])


def whole(of: Step) -> Int32s:
    return np.concatenate((of.prompt_ids, of.response_ids))


def extending(now: Step, before: Step) -> Step:
    """A full-prompt step as one that carries only what an earlier step lacks."""
    earlier = whole(before)
    shorter = min(len(earlier), len(now.prompt_ids))
    differs = np.flatnonzero(earlier[:shorter] != now.prompt_ids[:shorter])
    length = int(differs[0]) if len(differs) else shorter
    if not length:
        return now
    return replace(
        now, prompt_ids=now.prompt_ids[length:], extends=Extension(before.index, length, digest(earlier[:length]))
    )


def in_form(steps: list[Step], index: int, form: str) -> Step:
    """A step as a sender may send it: its whole prompt, or what it lacks of the one before or of the first one."""
    if form == "full" or not index:
        return steps[index]
    return extending(steps[index], steps[index - 1 if form == "nearest" else 0])


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
def test_any_order_any_form_and_any_repetition_give_the_same_rows(
    made: list[list[Step]], mode: Any, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        straight, mixed = (World(Path(folder), config(env={"max_turns": 8})) for folder in (one, other))
        work = straight.generator.claimed()
        assert mixed.generator.claimed() == work
        ids = [TrajectoryId(work.group_id, sample) for sample in work.samples]
        steps = [sampled(episode, of, work.prompt_uid) for episode, of in zip(made, ids, strict=True)]
        ends = [TrajectoryEnd(of, work.prompt_uid, len(e), "stop", 1.0) for e, of in zip(steps, ids, strict=True)]
        for episode, end in zip(steps, ends, strict=True):
            assert isinstance(straight.generator.send(episode, [end]), Receipt)
        places = [(g, index) for g, episode in enumerate(steps) for index in range(len(episode))]
        again = data.draw(st.lists(st.sampled_from(places), max_size=4))
        sent: dict[tuple[int, int], str] = {}
        for g, index in data.draw(st.permutations([*places, *again])):
            # Two references of different lengths can be compared only once the steps before them are there.
            comparable = (g, index) not in sent or all((g, before) in sent for before in range(index))
            form = data.draw(FORMS if comparable else st.sampled_from(["full", sent[g, index]]))
            sent.setdefault((g, index), form)
            answer = mixed.generator.send([in_form(steps[g], index, form)])
            assert isinstance(answer, Receipt), answer
        for end in ends:
            assert isinstance(mixed.generator.send([], [end]), Receipt)
        assert rows(mixed, work.group_id, mode) == rows(straight, work.group_id, mode)
        before = fingerprint(mixed.buffer.ledger), mixed.buffer.status().n_bytes
        mixed.crash()
        assert (fingerprint(mixed.buffer.ledger), mixed.buffer.status().n_bytes) == before
        assert rows(mixed, work.group_id, mode) == rows(straight, work.group_id, mode)


def turns(of: TrajectoryId, uid: str, count: int, new: int = 40) -> list[Step]:
    """A long episode in the full form."""
    rng, history, made = np.random.default_rng(of.sample), np.zeros(0, np.int32), list[Step]()
    for index in range(count):
        prompt = np.concatenate((history, rng.integers(0, 500, new, np.int32)))
        response = rng.integers(0, 500, new, np.int32)
        made.append(
            Step(of, uid, index, prompt, response, np.full(new, -1, np.float32), np.ones(new, np.bool_),
                 np.full(new, START.pack(), np.int64))
        )  # fmt: skip
        history = np.concatenate((prompt, response))
    return made


def long_world(folder: Path) -> World:
    generator = {"max_input_length": 8192, "max_generate_length": 64}
    return World(
        folder, config(env={"max_turns": 60}, generator=generator, trainer={"max_tokens_per_micro_batch": 1 << 14})
    )


def grown(world: World, count: int) -> tuple[int, int]:
    """Bytes that one episode of so many turns, sent turn by turn with full prompts, takes in memory and on disk."""
    work = world.generator.claimed()
    of = TrajectoryId(work.group_id, 0)
    memory, disk = world.buffer.status().n_bytes, world.buffer.status().journal_position
    for now in turns(of, work.prompt_uid, count):
        assert isinstance(world.generator.send([now]), Receipt)
    status = world.buffer.status()
    return status.n_bytes - memory, status.journal_position - disk


def test_an_episode_of_fifty_turns_sent_with_full_prompts_is_kept_in_its_new_tokens(tmp_path: Path) -> None:
    world = long_world(tmp_path)
    short, long = grown(world, 10), grown(world, 50)
    for few, many in zip(short, long, strict=True):
        assert many < 5.2 * few, (short, long)


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


def test_a_turn_that_starts_over_keeps_what_it_shares_with_an_earlier_one(tmp_path: Path) -> None:
    world = long_world(tmp_path)
    work = world.generator.claimed()
    of = TrajectoryId(work.group_id, 0)
    made = turns(of, work.prompt_uid, 4)
    compacted = replace(made[3], prompt_ids=np.concatenate((whole(made[0]), made[3].prompt_ids[-40:])))
    for now in [*made[:3], compacted]:
        assert isinstance(world.generator.send([now]), Receipt)
    for sample in work.samples:
        at = TrajectoryId(work.group_id, sample)
        end = TrajectoryEnd(at, work.prompt_uid, 4 if sample == 0 else 0, "stop", 1.0)
        assert isinstance(world.generator.send([], [end]), Receipt)
    kept = world.buffer.complete_group(work.group_id).steps
    assert kept.extends_K.tolist() == [-1, 0, 1, 2] and kept.extends_length_K.tolist() == [0, 80, 160, 80]


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


@pytest.mark.parametrize("expert", [3, 4])
def test_a_full_prompt_with_routed_experts_of_its_own_keeps_them(tmp_path: Path, expert: int) -> None:
    world = long_world(tmp_path)
    work = world.generator.claimed()
    made = turns(TrajectoryId(work.group_id, 0), work.prompt_uid, 2)
    assert isinstance(world.generator.send([routed(made[0], 3)]), Receipt)
    assert isinstance(world.generator.send([routed(made[1], expert)]), Receipt)
    ends = [TrajectoryEnd(TrajectoryId(work.group_id, s), work.prompt_uid, 2 - 2 * s, "stop", 1.0) for s in (0, 1)]
    assert isinstance(world.generator.send([], ends), Receipt)
    kept = world.buffer.complete_group(work.group_id).steps
    assert kept.extends_K[1] == -1 and kept.routed_experts_N is not None
    assert (kept.routed_experts_N[kept.offsets_K[1] :] == expert).all()


@pytest.mark.parametrize("first", ["full", "nearest", "first"])
@pytest.mark.parametrize("then", ["full", "nearest", "first"])
def test_a_step_that_differs_is_a_conflict_in_every_form(tmp_path: Path, first: str, then: str) -> None:
    world = long_world(tmp_path)
    work = world.generator.claimed()
    made = turns(TrajectoryId(work.group_id, 0), work.prompt_uid, 3)
    other = [*made[:2], replace(made[2], prompt_ids=np.append(made[2].prompt_ids[:-1], np.int32(499)))]
    assert made[2].prompt_ids[-1] != 499
    assert isinstance(world.generator.send([made[0], made[1], in_form(made, 2, first)]), Receipt)
    assert isinstance(again := world.generator.send([in_form(made, 2, then)]), Receipt) and again.duplicate
    answer = world.generator.send([in_form(other, 2, then)])
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
        steps, ends = change(
            [in_form(made, index, "nearest") for index in range(3)], TrajectoryEnd(of, work.prompt_uid, 3, "stop", 1.0)
        )
        if not together:
            assert isinstance(world.generator.send(steps[:2]), Receipt)
        answer = world.generator.send(steps if together else steps[2:], ends)
        assert isinstance(answer, Refusal) and answer.reason is reason


def test_two_references_that_nobody_can_follow_yet_are_refused_with_the_reason(tmp_path: Path) -> None:
    world = long_world(tmp_path)
    work = world.generator.claimed()
    made = turns(TrajectoryId(work.group_id, 0), work.prompt_uid, 3)
    assert isinstance(world.generator.send([in_form(made, 2, "nearest")]), Receipt)
    answer = world.generator.send([in_form(made, 2, "first")])
    assert isinstance(answer, Refusal) and answer.reason == RefusalReason.PREFIX


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
    ledger = Ledger(n_samples=1)
    ledger.apply(events.Joined("generator", "g", 1), now=0.0)
    for number in range(0, 4000, 2):  # every other message was refused
        ledger.accept(Sender("g", 1, number), [], routing=None, now=0.0)
    assert len(ledger.state.generators["g"].received) <= MESSAGES_REMEMBERED
    assert [ledger.received(Sender("g", 1, number)) for number in (3998, 3997, 2)] == [True, False, False]


def stripped_turns(of: TrajectoryId, uid: str, count: int, new: int = 40) -> list[Step]:
    """Full prompts none of which continues the step before: each answer loses its first half once it is history."""
    rng, history, made = np.random.default_rng(0), np.zeros(0, np.int32), list[Step]()
    for now in turns(of, uid, count, new):
        prompt = np.concatenate((history, rng.integers(0, 500, new, np.int32)))
        made.append(replace(now, prompt_ids=prompt))
        history = np.concatenate((prompt, now.response_ids[new // 2 :]))
    return made


def test_full_prompts_that_never_continue_are_kept_in_their_new_tokens(tmp_path: Path) -> None:
    world = long_world(tmp_path)
    work = world.generator.claimed()
    made = stripped_turns(TrajectoryId(work.group_id, 0), work.prompt_uid, 50)
    grew = []
    for now in made:
        before = world.buffer.status().n_bytes
        assert isinstance(world.generator.send([now]), Receipt)
        grew.append(world.buffer.status().n_bytes - before)
    token_bytes = bytes_per_token(steps_table(made))
    assert set(grew[1:]) == {
        grew[0] + token_bytes * 20
    }  # what is left of an answer stands where it did not stand before


def test_memory_holds_what_is_kept_of_full_prompts_and_not_the_messages(tmp_path: Path) -> None:
    world = long_world(tmp_path)
    work = world.generator.claimed()
    made = stripped_turns(TrajectoryId(work.group_id, 0), work.prompt_uid, 60, new=60)
    messages = [world.generator.message([now]) for now in made]
    sent = sum(map(len, messages))
    tracemalloc.start()
    try:
        while messages:
            assert isinstance(world.buffer.submit(bytes(memoryview(messages.pop(0)))), Receipt)
            world.journal.sync()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < sent / 2


def calls_of(run: Callable[[], object]) -> int:
    """How many functions are called, those of Python and of its extensions."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


def test_looking_up_full_prompts_costs_what_the_prompts_cost(tmp_path: Path) -> None:
    def calls(count: int) -> int:
        """Function calls that the buffer makes for an episode of so many turns."""
        generator = {"max_input_length": 1 << 15, "max_generate_length": 64}
        settings = config(
            env={"max_turns": count}, generator=generator, trainer={"max_tokens_per_micro_batch": 1 << 16}
        )
        world = World(tmp_path / str(count), settings)
        work = world.generator.claimed()
        made = stripped_turns(TrajectoryId(work.group_id, 0), work.prompt_uid, count)
        messages = [world.generator.message([now]) for now in made]
        return calls_of(lambda: [world.buffer.submit(message) for message in messages])

    assert calls(200) < 5 * calls(50)  # comparing every prompt with all before it would take 16 times as many
