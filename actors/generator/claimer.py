"""Claims groups from the buffer for a generator.

claim(wait 0 s) -> Wait(lookahead)             answered at once, with the reason why there is no group now
claim(wait 2 s) -> Wait(lookahead)             answered after 2 s, because there was still no group
claim(wait 2 s) -> Assignment, Assignment      answered as soon as there were groups: 17 and 18
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from actors.generator.outbox import Unreachable
from service.backoff import Backoff, retried
from service.errors import RunFailed, Starved
from service.handoff.verbs import Assignment, Claim, ClaimAnswer, Wait, WaitReason
from service.types import PolicyVersion, Refusal

POLL_SECONDS = 2.0
"""Length of one long poll in seconds."""
RETRY = Backoff(0.2, 0.2)
"""Pauses, in seconds, before an unreachable buffer is asked again."""


@dataclass(eq=False)
class Claimer:
    """Claims as many groups from the buffer as the generator has room for, and returns them one at a time."""

    generator: str
    incarnation: int
    claim: Callable[[Claim, float, int], Awaitable[ClaimAnswer]]
    """A function that sends a claim to the buffer. Arguments: the claim, maximum seconds to wait, maximum number of
    groups."""
    serving: Callable[[], PolicyVersion]
    """A function that returns the version which the engine serves."""
    deadline: float
    """Seconds without an answer of the buffer after which the run fails."""

    def __post_init__(self) -> None:
        self._request_id = 0
        """The last number that a claim has used. A claim uses one number for each group that it asks for. If Ray
        repeats a call whose answer was lost, the buffer answers the same number with the same assignment."""
        self.arrived: list[Assignment] = []
        """Assignments that are not played yet, also of abandoned polls."""
        self._look = asyncio.Event()
        self._was_full = False
        """Whether the generator was full at its newest claim."""
        self.leaves = False
        """Whether no more groups are claimed."""
        self.waiting: Wait | None = None
        """Why the buffer now gives no group; None: it was not asked, or it gave a group."""
        self.waited_for = "claim"
        """Why the last group did not come earlier: the buffer's reason, or `claim` if the group came at once."""

    def look_again(self) -> None:
        """Claim again at once, because the engine serves a newer version, with which the buffer may grant groups."""
        self._look.set()

    def leave(self) -> None:
        """Claim no more groups."""
        self.leaves = True
        self._look.set()

    def has_room(self) -> None:
        """Claim again at once, if the generator was full when it claimed."""
        if self._was_full:
            self._look.set()

    async def next(self, room: Callable[[], int] = lambda: 1) -> Assignment | None:
        """Return the next group; None if the buffer is drained, or this generator leaves.

        `room`: returns the maximum number of groups in a claim; 0: claim only trajectories that another generator
        began. A claim is sent only if no group of an earlier claim is left.

        Raises:
            RunFailed: another incarnation took this generator's place.
            Starved: the buffer did not answer within the deadline.
        """
        # The first claim returns at once, with the reason for waiting. Later claims are long polls.
        seconds = 0.0
        while not (self.arrived or self.leaves):
            answer = await self._answered(seconds, room())
            if isinstance(answer, Refusal):
                raise RunFailed(f"the buffer refuses work to {self.generator}: {answer}")
            if isinstance(answer, list):
                self.arrived += answer
            elif answer is not None:
                self.waiting = answer
                if answer.reason == WaitReason.DRAINED:
                    return None
            seconds = POLL_SECONDS
        if self.leaves:
            return None  # arrived groups are handed over, as open groups are
        self.waited_for = str(self.waiting.reason) if self.waiting is not None else "claim"
        self.waiting = None
        return self.arrived.pop(0)

    async def _answered(self, seconds: float, room: int) -> ClaimAnswer | None:
        async def ask() -> ClaimAnswer | None:
            return None if self.leaves else await self._poll(seconds, room)

        try:
            return await retried(ask, Unreachable, RETRY, within=self.deadline)
        except Unreachable as error:
            waited = f"{self.generator} waited {self.deadline:.0f} s for the buffer to answer a claim"
            raise Starved(waited) from error

    async def _poll(self, seconds: float, room: int) -> ClaimAnswer | None:
        self._look.clear()
        self._was_full = not room
        claim = Claim(self.generator, self.incarnation, self.serving(), self._request_id + 1, only_moved=not room)
        self._request_id += (most := max(room, 1))
        poll = asyncio.ensure_future(self.claim(claim, seconds, most))
        look = asyncio.ensure_future(self._look.wait())
        try:
            await asyncio.wait([poll, look], return_when=asyncio.FIRST_COMPLETED)
        finally:
            look.cancel()
            if not poll.done():
                # The poll continues in the background, and its late assignment is still used.
                poll.add_done_callback(self._take_late)
        return poll.result() if poll.done() else None

    def _take_late(self, poll: asyncio.Future[ClaimAnswer]) -> None:
        if poll.cancelled() or poll.exception() is not None:
            return
        answer = poll.result()
        if isinstance(answer, list):
            self.arrived += answer
            self._look.set()
