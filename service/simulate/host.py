"""The buffer's process: the real buffer and journal, group commit, long polls, death and restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from service.config import Config
from service.handoff.buffer import Buffer
from service.handoff.journal.journal import Journal
from service.handoff.verbs import Wait
from service.simulate.disk import MemoryDisk
from service.simulate.loop import Loop, VirtualClock
from service.types import PolicyVersion

FOLDER = Path("journal")
TICK_SECONDS = 0.5
VOCABULARY = 1 << 20

Reply = Callable[[Any], None]


class Poll(NamedTuple):
    """A request that waits at the host."""

    deadline: float
    request: Callable[[Buffer], Any]
    reply: Reply
    serving: Callable[[], PolicyVersion] | None


class Host:
    """Answers requests with `Buffer`; an answer is sent only when the journal is synced."""

    def __init__(
        self,
        config: Config,
        prompt_uids: Sequence[str],
        loop: Loop,
        disk: MemoryDisk,
        rng: np.random.Generator,
        segment_bytes: int = 64 << 20,
    ) -> None:
        self.loop = loop
        self.disk = disk
        self.buffer: Buffer
        self.journal: Journal
        self.clock = VirtualClock(loop)
        self.alive = False
        self.incarnation = 0
        self.on_death: Callable[[], None] = lambda: None
        self.on_restart: Callable[[], None] = lambda: None
        self.doom: tuple[str, int] | None = None
        """The seam at which to die, `before_sync` or `after_sync`, and how many passes of it to survive first."""
        self._config = config
        self._prompt_uids = prompt_uids
        self._rng = rng
        self._segment_bytes = segment_bytes
        self._unsynced: list[tuple[int, Reply, Any]] = []
        self._polls: list[Poll] = []
        self._sync_is_due = False
        self._look_is_due = False
        self.start()

    def start(self) -> None:
        """Start a new process on the disk's files; its monotonic clock starts at a random time."""
        self.clock = VirtualClock(self.loop, float(self._rng.uniform(0, 1e6)))
        self.journal = Journal(FOLDER, self.clock, self.disk, self._segment_bytes)
        seed = self._config.run.seed
        self.buffer = Buffer(self._config, VOCABULARY, self._prompt_uids, self.journal, self.clock, seed)
        self.incarnation += 1
        self.alive = True
        self.journal.sync()
        self.on_restart()
        self._tick(self.incarnation)

    def die(self) -> None:
        """End as by kill -9 and loss of power: unsynced bytes are lost and no more answers are sent."""
        self.alive = False
        self._unsynced, self._polls, self._sync_is_due = [], [], False
        self.disk.lose_power(self._rng)
        self.on_death()

    def ask(self, request: Callable[[Buffer], Any], reply: Reply) -> None:
        """Serve a request now."""
        if self.alive:
            self._answer(request(self.buffer), reply)

    def poll(
        self,
        request: Callable[[Buffer], Any],
        patience: float,
        reply: Reply,
        serving: Callable[[], PolicyVersion] | None = None,
    ) -> None:
        """Serve a request as soon as its answer is not a Wait, or with that Wait after `patience` seconds.

        `serving`: of a claim, the version that its engine serves. If a claim has to wait, claims of engines that serve
        nothing newer have to wait too.
        """
        if not self.alive:
            return
        answer = request(self.buffer)
        if not isinstance(answer, Wait):
            self._answer(answer, reply)
            return
        self._polls.append(Poll(self.loop.now + patience, request, reply, serving))

    def look_soon(self) -> None:
        """Something changed outside the buffer: serve the waiting requests again."""
        if not self._look_is_due:
            self._look_is_due = True
            self.loop.after(0.0, self._look_again)

    def _doomed(self, seam: str) -> bool:
        """Whether the process dies at this seam now."""
        if self.doom is None or self.doom[0] != seam:
            return False
        self.doom = (seam, self.doom[1] - 1) if self.doom[1] > 0 else None
        if self.doom is None:
            self.die()
        return self.doom is None

    def _answer(self, answer: Any, reply: Reply) -> None:
        if not self.alive or self._doomed("before_sync"):
            return
        self._unsynced.append((self.journal.position, reply, answer))
        if not self._sync_is_due:
            self._sync_is_due = True
            incarnation = self.incarnation
            self.loop.after(self._config.buffer.sync_interval, lambda: self._sync(incarnation))

    def _sync(self, incarnation: int) -> None:
        """Group commit; then send the answers that it covers, and serve the waiting requests again."""
        if not self.alive or incarnation != self.incarnation:
            return
        self._sync_is_due = False
        synced = self.journal.sync()
        if self._doomed("after_sync"):
            return
        leaving = [(reply, answer) for position, reply, answer in self._unsynced if position <= synced]
        self._unsynced = [entry for entry in self._unsynced if entry[0] > synced]
        for reply, answer in leaving:
            reply(answer)
        self._look_again()
        if self._unsynced and not self._sync_is_due:
            self._sync_is_due = True
            self.loop.after(TICK_SECONDS, lambda: self._sync(incarnation))

    def _look_again(self) -> None:
        """Serve waiting requests whose time has come."""
        self._look_is_due = False
        if not self.alive:
            return
        polls, self._polls = self._polls, []
        blocked: PolicyVersion | None = None
        for poll in polls:
            hopeless = blocked is not None and poll.serving is not None and poll.serving() <= blocked
            if hopeless and self.loop.now < poll.deadline:
                self._polls.append(poll)
                continue
            answer = poll.request(self.buffer)
            if not isinstance(answer, Wait) or self.loop.now >= poll.deadline:
                self._answer(answer, poll.reply)
                if not self.alive:
                    return
                continue
            self._polls.append(poll)
            if poll.serving is not None:
                blocked = max(poll.serving(), blocked or poll.serving())

    def _tick(self, incarnation: int) -> None:
        if self.alive and incarnation == self.incarnation:
            self.buffer.tick()
            self._look_again()
            self.loop.after(TICK_SECONDS, lambda: self._tick(incarnation))
