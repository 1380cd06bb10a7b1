"""Claims that wait for a group; after each change of the buffer, one waiting claim is answered per available group.

If a claim has to wait, all claims of engines with the same or an older version have to wait too, so they are not tried:

    waiting     g1 serves 4    g2 serves 4    g3 serves 5    g4 serves 4    ...
    tried       g1: group 17   g2: wait       g3: wait                            three tries, however many claims wait
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

from service.handoff.verbs import Assignment, Claim, Wait, WaitReason
from service.types import PolicyVersion, Refusal

ClaimAnswer = list[Assignment] | Wait | Refusal

FINAL = (WaitReason.DRAINED, WaitReason.ANSWERED)
"""Reasons to wait that no later event removes: a claim with such a reason is answered at once."""


@dataclass(frozen=True, slots=True)
class WaitingClaim:
    """A claim, and the function that sends its answer."""

    claim: Claim
    most: int
    """Maximum number of groups in the claim's answer."""
    wait: Wait
    """The buffer's answer when the claim arrived."""
    deadline: float
    """Monotonic time in seconds at which the claim is answered with `wait`."""
    reply: Callable[[ClaimAnswer], None]


class WaitingClaims:
    """Claims that wait for a group, in order of arrival."""

    def __init__(self, ask: Callable[[Claim, int], ClaimAnswer]) -> None:
        """`ask`: returns the buffer's answer to a claim of up to a given number of groups."""
        self._ask = ask
        self._waiting: dict[int, WaitingClaim] = {}
        """The waiting claims, by number of arrival."""
        self._came = 0

    def answer(self, claim: Claim, most: int, deadline: float | None, reply: Callable[[ClaimAnswer], None]) -> None:
        """Answer a claim, by calling `reply`, as soon as there is a group for it, or at `deadline`; without a deadline,
        at once. `most`: maximum number of groups in the answer.

        The deadline must not be earlier than the deadline of the claim before.
        """
        answer = self._ask(claim, most)
        if deadline is None or not _waits(answer):
            reply(answer)
            return
        self._came += 1
        self._waiting[self._came] = WaitingClaim(claim, most, answer, deadline, reply)

    def look(self) -> None:
        """After a change of the buffer, answer the waiting claims for which there is now a group, in order of
        arrival."""
        blocked: PolicyVersion | None = None
        for number, waiting in list(self._waiting.items()):
            serving = waiting.claim.serving
            if number not in self._waiting or (blocked is not None and serving <= blocked):
                continue  # a reply may have taken it
            answer = self._ask(waiting.claim, waiting.most)
            if _waits(answer):
                blocked = serving
            else:
                del self._waiting[number]
                waiting.reply(answer)

    def expire(self, now: float) -> None:
        """Answer every claim whose deadline has passed, with the `Wait` that the buffer returned when the claim
        arrived."""
        while self._waiting:
            number, waiting = next(iter(self._waiting.items()))
            if waiting.deadline > now:
                return
            del self._waiting[number]
            waiting.reply(waiting.wait)

    def take(self) -> list[WaitingClaim]:
        """Remove and return all waiting claims, unanswered."""
        taken = list(self._waiting.values())
        self._waiting.clear()
        return taken


def _waits(answer: ClaimAnswer) -> TypeGuard[Wait]:
    return isinstance(answer, Wait) and answer.reason not in FINAL
