"""What a generator finished reaches the buffer, in few messages, however the messages fare."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from actors.generator import outbox as outbox_module
from actors.generator.outbox import Outbox, Unreachable
from service.config import Config
from service.config.core_settings import message_limits
from service.errors import RunFailed, Starved
from service.handoff.steps.wire import decode
from service.handoff.verbs import Receipt
from service.types import Refusal, RefusalReason, Step, StepGroup, TrajectoryEnd, TrajectoryId
from tests.pure.actors.fakes import until
from tests.pure.handoff import worlds

LIMITS = message_limits(Config(), vocab_size=100)
POISONED = 13

Answer = Receipt | Refusal


def step(group_id: int, index: int = 0, n_tokens: int = 2) -> Step:
    of, uid = TrajectoryId(group_id, 0), f"p{group_id}"
    return worlds.step(index, [1, 2, 3], [4] * n_tokens, trajectory=of, uid=uid, version=7)


def end(group_id: int) -> TrajectoryEnd:
    return TrajectoryEnd(TrajectoryId(group_id, 0), f"p{group_id}", 1, "stop", 1.0)


class FakeBuffer:
    """Answers as told, and remembers what it was sent."""

    def __init__(self, answer: Callable[[StepGroup], Answer] = lambda group: Receipt()) -> None:
        self.answer = answer
        self.sent: list[bytes] = []
        self.refused: list[TrajectoryId] = []
        self.fail_first: list[BaseException] = []

    async def submit(self, data: bytes) -> Answer:
        self.sent.append(data)
        await asyncio.sleep(0)
        if self.fail_first:
            raise self.fail_first.pop()
        return self.answer(decoded(data))

    def group_ids(self) -> list[int]:
        """Ordinals of all steps that came, in order."""
        return [group_id for data in self.sent for group_id in decoded(data).steps.group_id_K.tolist()]


def decoded(data: bytes) -> StepGroup:
    group = decode(data, LIMITS)
    assert isinstance(group, StepGroup)
    return group


@asynccontextmanager
async def sending(buffer: FakeBuffer, deadline: float = 120.0) -> AsyncIterator[tuple[Outbox, asyncio.Future[None]]]:
    """An outbox that sends to the buffer, and what runs it."""
    outbox = Outbox("g", 3, buffer.submit, deadline, buffer.refused.append)
    running = asyncio.ensure_future(outbox.run())
    try:
        yield outbox, running
    finally:
        running.cancel()


async def deliver(buffer: FakeBuffer, items: list[Step | TrajectoryEnd], deadline: float = 120.0) -> Outbox:
    async with sending(buffer, deadline) as (outbox, running):
        for item in items:
            outbox.append(item) if isinstance(item, Step) else outbox.end(item)
        await asyncio.wait([asyncio.ensure_future(outbox.flush()), running], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    return outbox


async def test_what_finishes_together_travels_together_in_order() -> None:
    buffer = FakeBuffer()
    await deliver(buffer, [step(0), step(1), end(0), step(2)])
    (group,) = map(decoded, buffer.sent)
    assert group.steps.group_id_K.tolist() == [0, 1, 2] and group.ends.group_id_E.tolist() == [0]
    assert (group.sender.generator, group.sender.incarnation, group.sender.sequence) == ("g", 3, 1)


async def test_the_turns_of_a_group_travel_in_one_message_which_goes_when_the_group_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox_module, "HOLD_SECONDS", 1000.0)
    buffer = FakeBuffer()
    async with sending(buffer) as (outbox, _):
        for index in range(3):
            outbox.append(step(0, index))
            await asyncio.sleep(0.01)  # turns end one after the other
        outbox.end(end(0))
        assert not buffer.sent
        outbox.hurry()
        outbox.append(step(1))  # too late for the message only once that is sent
        await asyncio.sleep(0.01)
        assert buffer.group_ids() == [0, 0, 0, 1] and len(buffer.sent) == 1
        outbox.append(step(2))
        await outbox.flush()
        assert buffer.group_ids()[4:] == [2] and len(buffer.sent) == 2


async def test_complete_groups_wait_for_as_many_as_the_next_mini_batch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "HOLD_SECONDS", 1000.0)
    buffer = FakeBuffer(lambda group: Receipt(wanted=3))
    async with sending(buffer) as (outbox, _):

        async def complete(group_id: int, last: bool = False) -> list[int]:
            outbox.append(step(group_id))
            outbox.end(end(group_id))
            outbox.group_complete(last)
            await asyncio.sleep(0.01)
            return buffer.group_ids()

        assert await complete(0) == [0]  # the buffer has not said yet what it lacks
        assert [await complete(group_id) for group_id in (1, 2, 3, 4)] == [[0], [0], [0, 1, 2, 3], [0, 1, 2, 3]]
        assert await complete(5, last=True) == [0, 1, 2, 3, 4, 5]
        assert len(buffer.sent) == 3


async def test_an_answer_that_lacks_fewer_groups_sends_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "HOLD_SECONDS", 1000.0)
    lacking, answering = iter([3, 1, 1]), asyncio.Event()
    buffer = FakeBuffer(lambda group: Receipt(wanted=next(lacking)))

    async def submit(data: bytes) -> Answer:
        if buffer.sent:
            await answering.wait()
        return await buffer.submit(data)

    async with sending(buffer) as (outbox, _):
        outbox.submit = submit
        outbox.append(step(0))
        outbox.group_complete(last=True)
        await until(lambda: buffer.sent)
        outbox.append(step(1))
        outbox.hurry()
        await until(lambda: outbox._open is None)
        outbox.append(step(2))
        outbox.group_complete(last=False)
        answering.set()
        await until(lambda: len(buffer.sent) == 3)
    assert buffer.group_ids() == [0, 1, 2]


async def test_a_turn_of_a_group_that_takes_long_is_not_held_back_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "HOLD_SECONDS", 0.01)
    buffer = FakeBuffer()
    async with sending(buffer) as (outbox, _):
        outbox.append(step(0))
        await until(lambda: buffer.sent)
    assert buffer.group_ids() == [0]


async def test_who_waits_for_a_step_gets_the_answer_to_its_own_trajectory_without_the_delay_of_batching(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox_module, "HOLD_SECONDS", 1000.0)

    def answer(group: StepGroup) -> Answer:
        if 1 in group.steps.group_id_K:
            return Refusal(RefusalReason.EMPTY, "poison")
        return Receipt(late=(TrajectoryId(2, 0),) if 2 in group.steps.group_id_K else ())

    buffer = FakeBuffer(answer)
    async with sending(buffer) as (outbox, _):
        waiting = []
        for group_id in range(4):
            outbox.append(step(group_id))
            waiting.append(asyncio.ensure_future(outbox.accepted(TrajectoryId(group_id, 0))))
        await asyncio.sleep(0)
        assert not any(one.done() for one in waiting) and not buffer.sent
        assert await asyncio.gather(*waiting) == [True, False, False, True]
    assert buffer.refused == [TrajectoryId(1, 0), TrajectoryId(2, 0)]


async def test_long_messages_are_split_and_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MESSAGE_BYTES", 500)
    buffer = FakeBuffer()
    await deliver(buffer, [step(group_id, n_tokens=20) for group_id in range(10)])
    assert buffer.group_ids() == list(range(10))
    assert [decoded(data).sender.sequence for data in buffer.sent] == list(range(1, len(buffer.sent) + 1))
    assert len(buffer.sent) == 5


async def test_no_message_has_more_names_than_its_header_may_hold() -> None:
    buffer = FakeBuffer()
    ends = [TrajectoryEnd(TrajectoryId(o, 0), f"{o:0500}", 0, "stop", 1.0) for o in range(3000)]
    await deliver(buffer, list(ends))
    sent = [group_id for data in buffer.sent for group_id in decoded(data).ends.group_id_E.tolist()]
    assert sent == list(range(3000)) and len(buffer.sent) == 3


async def test_routed_experts_of_another_shape_go_into_a_message_of_their_own() -> None:
    """An engine that errs in it must not take the steps of other trajectories along."""

    def routed(group_id: int, layers: int) -> Step:
        return replace(step(group_id), routed_experts=np.zeros((5, layers, 2), np.int16))

    buffer = FakeBuffer(lambda group: Refusal(RefusalReason.LENGTH_MISMATCH, "") if _layers(group) == 3 else Receipt())
    await deliver(
        buffer, [routed(0, 2), step(1), routed(2, 2), end(2), routed(3, 3), step(4), routed(5, 3), routed(6, 2)]
    )
    sent = [decoded(data).steps.group_id_K.tolist() for data in buffer.sent]
    assert sent[:2] == [[0, 1, 2], [3, 4, 5]] and sorted(sent[2:]) == [[3], [4], [5], [6]]
    assert sorted(buffer.refused) == [TrajectoryId(3, 0), TrajectoryId(5, 0)]


def _layers(group: StepGroup) -> int | None:
    experts = group.steps.routed_experts_N
    return None if experts is None else experts.shape[1]


async def test_a_message_without_an_answer_is_sent_again_as_the_same_bytes() -> None:
    buffer = FakeBuffer()
    buffer.fail_first = [Unreachable("gone"), Unreachable("gone")]
    await deliver(buffer, [step(0)])
    assert len(buffer.sent) == 3 and len(set(buffer.sent)) == 1


async def test_a_buffer_that_hangs_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "ANSWER_SECONDS", 1.0)
    buffer = FakeBuffer()
    answer = buffer.submit

    async def hangs_once(data: bytes) -> Answer:
        result = await answer(data)
        if len(buffer.sent) == 1:
            await asyncio.Event().wait()
        return result

    buffer.submit = hangs_once  # type: ignore[method-assign]
    await deliver(buffer, [step(0)])
    assert len(buffer.sent) == 2 and len(set(buffer.sent)) == 1


async def test_a_buffer_that_never_answers_starves_the_generator_with_a_reason() -> None:
    buffer = FakeBuffer()
    buffer.fail_first = [Unreachable("gone")] * 100
    with pytest.raises(ExceptionGroup) as caught:
        await deliver(buffer, [step(0)], deadline=0.2)
    assert caught.group_contains(Starved, match="no answer from the buffer")


def poison(group: StepGroup) -> Answer:
    found = np.flatnonzero(group.steps.group_id_K == POISONED)
    return Refusal(RefusalReason.LOGPROB, f"step={found[0]}", 0.5) if len(found) else Receipt()


async def test_a_refused_trajectory_does_not_take_the_others_of_its_message_with_it() -> None:
    buffer = FakeBuffer(poison)
    outbox = await deliver(buffer, [step(1), step(POISONED), step(2), end(1), end(2)])
    accepted = [data for data in buffer.sent if isinstance(poison(decoded(data)), Receipt)]
    assert sorted(group_id for data in accepted for group_id in decoded(data).steps.group_id_K.tolist()) == [1, 2]
    assert sorted(group_id for data in accepted for group_id in decoded(data).ends.group_id_E.tolist()) == [1, 2]
    assert buffer.refused == [TrajectoryId(POISONED, 0)]
    assert outbox.refusals[RefusalReason.LOGPROB] == 2
    alone = FakeBuffer(poison)
    await deliver(alone, [step(POISONED)])
    assert len(alone.sent) == 1 and alone.refused == [TrajectoryId(POISONED, 0)]


async def test_a_fenced_incarnation_fails() -> None:
    buffer = FakeBuffer(lambda group: Refusal(RefusalReason.FENCED, "incarnation", 4))
    with pytest.raises(ExceptionGroup) as caught:
        await deliver(buffer, [step(0)])
    assert caught.group_contains(RunFailed, match="newer incarnation")
