"""Claims: a group that the buffer assigns is played, however late the assignment arrives."""

import asyncio

import pytest

from actors.generator import claimer as claims
from actors.generator.claimer import ClaimAnswer, Claimer
from actors.generator.outbox import Unreachable
from service.backoff import Backoff
from service.errors import RunFailed, Starved
from service.handoff.verbs import Assignment, Claim, Wait, WaitReason
from service.types import PolicyVersion, Refusal, RefusalReason
from tests.pure.actors.fakes import until

LOOKAHEAD = Wait(WaitReason.LOOKAHEAD, "slot 9", 0.0)
DRAINED = Wait(WaitReason.DRAINED, "run_end", 0.0)


def group(group_id: int) -> Assignment:
    return Assignment(group_id, f"p{group_id}", group_id, (0, 1), (0, 0))


def groups(*group_ids: int) -> list[Assignment]:
    return [group(group_id) for group_id in group_ids]


class FakeBuffer:
    """Gives the scripted answers one after the other; a future is waited for."""

    def __init__(self, *answers: ClaimAnswer | BaseException | asyncio.Future[ClaimAnswer]) -> None:
        self.answers = list(answers)
        self.claims: list[tuple[Claim, float]] = []
        self.most: list[int] = []

    async def claim(self, claim: Claim, seconds: float, most: int) -> ClaimAnswer:
        self.most.append(most)
        self.claims.append((claim, seconds))
        answer = self.answers.pop(0)
        if isinstance(answer, asyncio.Future):
            return await answer
        if isinstance(answer, BaseException):
            raise answer
        return answer


def source(buffer: FakeBuffer, versions: list[PolicyVersion] | None = None, deadline: float = 100.0) -> Claimer:
    serving = versions or [PolicyVersion(1, 0)]
    return Claimer("g", 2, buffer.claim, lambda: serving[-1], deadline)


async def test_the_first_claim_asks_at_once_and_the_next_ones_wait() -> None:
    buffer = FakeBuffer(LOOKAHEAD, LOOKAHEAD, groups(3))
    claimer = source(buffer)
    assert await claimer.next() == group(3)
    assert [seconds for _, seconds in buffer.claims] == [0.0, claims.POLL_SECONDS, claims.POLL_SECONDS]
    assert claimer.waited_for == "lookahead" and claimer.waiting is None


async def test_a_generator_that_leaves_claims_no_more_also_while_it_waits() -> None:
    buffer = FakeBuffer(LOOKAHEAD, asyncio.get_running_loop().create_future())
    claimer = source(buffer)
    waiting = asyncio.ensure_future(claimer.next())
    await until(lambda: len(buffer.claims) >= 2)
    assert claimer.waiting == LOOKAHEAD, "why there is no work can be seen"
    claimer.leave()
    assert await waiting is None and await claimer.next() is None
    assert len(buffer.claims) == 2
    claimer = source(FakeBuffer(groups(3, 4)))
    assert await claimer.next(lambda: 2) == group(3)
    claimer.leave()
    assert await claimer.next() is None, "what arrived is left to others"


async def test_a_newer_version_makes_a_new_claim_and_the_overtaken_one_loses_nothing() -> None:
    overtaken: asyncio.Future[ClaimAnswer] = asyncio.get_running_loop().create_future()
    versions = [PolicyVersion(1, 0)]
    buffer = FakeBuffer(LOOKAHEAD, overtaken, groups(7), LOOKAHEAD, LOOKAHEAD, DRAINED)
    claimer = source(buffer, versions)
    waiting = asyncio.ensure_future(claimer.next())
    await until(lambda: len(buffer.claims) >= 2)
    versions.append(PolicyVersion(1, 1))
    claimer.look_again()
    assert await waiting == group(7)
    assert [claim.serving.step for claim, _ in buffer.claims] == [0, 0, 1]
    assert len({claim.request_id for claim, _ in buffer.claims}) == 3, "Ray may repeat each of them"
    overtaken.set_result(groups(8))
    await asyncio.sleep(0)
    assert await claimer.next() == group(8)
    assert await claimer.next() is None


async def test_an_unreachable_buffer_is_asked_again_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "RETRY", Backoff(0.01))
    assert await source(FakeBuffer(Unreachable(), Unreachable(), groups(1))).next() == group(1)
    with pytest.raises(Starved, match="g waited"):
        await source(FakeBuffer(*[Unreachable()] * 1000), deadline=0.1).next()


async def test_a_refused_claim_fails_with_the_reason() -> None:
    with pytest.raises(RunFailed, match="fenced"):
        await source(FakeBuffer(Refusal(RefusalReason.FENCED, "incarnation", 3))).next()


async def test_the_groups_of_one_answer_are_given_out_one_by_one_without_another_claim() -> None:
    buffer = FakeBuffer(groups(3, 4, 5), groups(6), DRAINED)
    claimer = source(buffer)
    assert [await claimer.next(lambda room=room: room) for room in (4, 3, 2, 1)] == groups(3, 4, 5, 6)
    assert await claimer.next(lambda: 2) is None
    assert buffer.most == [4, 1, 2]
    numbers = [claim.request_id for claim, _ in buffer.claims]
    assert numbers == [1, 5, 6], "each group that was asked for has a number of its own"
