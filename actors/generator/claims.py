"""Where a generator's work comes from, and how long it had none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from actors.generator.outbox import Unreachable
from service.errors import RunFailed, Starved
from service.handoff.verbs import Assignment, Claim, Wait, WaitReason
from service.types import PolicyVersion, Refusal

POLL_SECONDS = 2.0
"""Length of one long poll for work."""
RETRY_SECONDS = 0.2
"""Pause before an unreachable buffer is asked again."""

Answer = Assignment | Wait | Refusal


class WorkSource:
    """Claims groups from the buffer, one at a time."""

    def __init__(
        self,
        generator: str,
        incarnation: int,
        claim: Callable[[Claim, float], Awaitable[Answer]],
        serving: Callable[[], PolicyVersion],
        deadline: float,
    ) -> None:
        self._generator = generator
        self._incarnation = incarnation
        self._claim = claim
        self._serving = serving
        self._deadline = deadline
        self._number = 0
        """Of the newest claim; Ray repeats a claim whose answer was lost, and the buffer knows it by its number."""
        self._late: list[Assignment] = []
        self._look = asyncio.Event()
        self.waiting: Wait | None = None
        """Why there is no work, while there is none."""
        self.waited_for = "claim"
        """Why the last group did not come earlier: the buffer's reason, or the claim's own way."""

    def look_again(self) -> None:
        """The engine serves a newer version, for which there may be work already."""
        self._look.set()

    async def next(self) -> Assignment | None:
        """The next group; None when no more will come.

        Raises:
            RunFailed: another incarnation took this generator's place.
            Starved: the buffer did not answer within the deadline.
        """
        # The first answer comes at once and says why there is nothing; only then is a long poll worth while.
        seconds = 0.0
        heard = time.monotonic()
        while not self._late:
            try:
                answer = await self._poll(seconds)
            except Unreachable as error:
                silent = time.monotonic() - heard
                if silent > self._deadline:
                    raise Starved(
                        f"{self._generator} waited {silent:.0f} s for the buffer to answer a claim"
                    ) from error
                await asyncio.sleep(RETRY_SECONDS)
                continue
            heard = time.monotonic()
            if isinstance(answer, Refusal):
                raise RunFailed(f"the buffer refuses work to {self._generator}: {answer}")
            if isinstance(answer, Assignment):
                return self._given(answer)
            if answer is not None:
                self.waiting = answer
                if answer.reason == WaitReason.DRAINED:
                    return None
            seconds = POLL_SECONDS
        return self._given(self._late.pop())

    def _given(self, assignment: Assignment) -> Assignment:
        self.waited_for = str(self.waiting.reason) if self.waiting is not None else "claim"
        self.waiting = None
        return assignment

    async def _poll(self, seconds: float) -> Answer | None:
        """Ask for work; None when it is worth while to ask again for a newer version."""
        self._look.clear()
        self._number += 1
        claim = Claim(self._generator, self._incarnation, self._serving(), self._number)
        poll = asyncio.ensure_future(self._claim(claim, seconds))
        look = asyncio.ensure_future(self._look.wait())
        try:
            await asyncio.wait([poll, look], return_when=asyncio.FIRST_COMPLETED)
        finally:
            look.cancel()
        if poll.done():
            return poll.result()
        # It is left to end by itself: a group that it still brings is as good as any other.
        poll.add_done_callback(self._take_late)
        return None

    def _take_late(self, poll: asyncio.Future[Answer]) -> None:
        if poll.cancelled() or poll.exception() is not None:
            return
        answer = poll.result()
        if isinstance(answer, Assignment):
            self._late.append(answer)
            self._look.set()


class IdleTime:
    """How long nothing was there to generate."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._since: float | None = None
        self._seconds = 0.0

    def begin(self) -> None:
        """Start measuring; there is nothing to do yet."""
        self._began = self._since = time.monotonic()

    def idle(self) -> None:
        """There is nothing to generate any more."""
        self._since = time.monotonic()

    def busy(self) -> float | None:
        """There is something to generate: the seconds without, None where there was something before."""
        if self._since is None:
            return None
        seconds = time.monotonic() - self._since
        self._seconds += seconds
        self._since = None
        return seconds

    @property
    def seconds(self) -> float:
        """Seconds without work so far."""
        return self._seconds + (time.monotonic() - self._since if self._since is not None else 0.0)

    @property
    def elapsed(self) -> float:
        """Seconds since `begin`."""
        return time.monotonic() - self._began if self._began is not None else 0.0
