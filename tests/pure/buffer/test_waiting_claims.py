"""Claims that wait for a group: which are served, in which order, and how many are asked for that."""

from dataclasses import dataclass, field

import pytest

from service.handoff.claims import FINAL, WaitingClaims
from service.handoff.verbs import Assignment, Claim, ClaimAnswer, Wait, WaitReason
from service.types import PolicyVersion


@dataclass
class Gives:
    """A buffer with groups for engines that serve at least the version of each group."""

    groups: list[int] = field(default_factory=list)
    """The step of the version that each group needs."""
    reason: WaitReason = WaitReason.LOOKAHEAD
    asked: int = 0

    def claim(self, claim: Claim, most: int) -> ClaimAnswer:
        self.asked += 1
        given = [needed for needed in self.groups if needed <= claim.serving.step][:most]
        for needed in given:
            self.groups.remove(needed)
        return [Assignment(needed, "p", 0, (0,), (0,)) for needed in given] or Wait(self.reason, "nothing", 0.0)


@dataclass
class Waiters:
    """Claims of engines that serve some steps, and who got what, in order."""

    buffer: Gives
    got: list[tuple[int, ClaimAnswer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.claims = WaitingClaims(self.buffer.claim)
        self.came = 0

    def come(self, step: int, deadline: float | None = 10.0, most: int = 1) -> None:
        number, self.came = self.came, self.came + 1
        claim = Claim(f"g{number}", 1, PolicyVersion(1, step))
        self.claims.answer(claim, most, deadline, lambda answer: self.got.append((number, answer)))

    @property
    def served(self) -> list[int]:
        return [number for number, answer in self.got if isinstance(answer, list)]


def test_of_ten_thousand_that_wait_only_those_are_asked_that_can_be_served_and_one_more() -> None:
    waiters = Waiters(Gives())
    for _ in range(10_000):
        waiters.come(step=4)
    waiters.buffer.asked, waiters.buffer.groups = 0, [4, 4, 3]
    waiters.claims.look()
    assert waiters.served == [0, 1, 2]
    assert waiters.buffer.asked == 4
    waiters.claims.look()
    assert waiters.buffer.asked == 5, "nothing has changed"


def test_one_that_serves_newer_weights_is_served_though_older_ones_came_first_and_wait() -> None:
    waiters = Waiters(Gives())
    for step in (4, 4, 5, 4, 5):
        waiters.come(step)
    waiters.buffer.groups = [5]
    waiters.claims.look()
    assert waiters.served == [2]
    waiters.buffer.groups = [0, 0, 0]
    waiters.claims.look()
    assert waiters.served == [2, 0, 1, 3], "in the order in which they came"


def test_each_gets_its_reason_at_its_deadline_and_is_then_out_of_the_line() -> None:
    waiters = Waiters(Gives())
    waiters.come(step=4, deadline=None)
    assert [number for number, _ in waiters.got] == [0], "who does not want to wait is told at once"
    for deadline in (10.0, 11.0, 12.0):
        waiters.come(step=4, deadline=deadline)
    waiters.claims.expire(11.0)
    assert waiters.got[1:] == [(number, Wait(WaitReason.LOOKAHEAD, "nothing", 0.0)) for number in (1, 2)]
    waiters.buffer.groups = [4, 4]
    waiters.claims.look()
    assert waiters.served == [3] and waiters.buffer.groups == [4]


@pytest.mark.parametrize("reason", FINAL)
def test_a_claim_for_which_no_group_can_come_waits_for_none_and_keeps_nobody_waiting(reason: WaitReason) -> None:
    waiters = Waiters(Gives())
    waiters.come(step=4)
    waiters.buffer.reason = reason
    waiters.come(step=4)
    waiters.claims.look()
    assert [number for number, _ in waiters.got] == [1, 0]
    assert {answer for _, answer in waiters.got if isinstance(answer, Wait)} == {Wait(reason, "nothing", 0.0)}
