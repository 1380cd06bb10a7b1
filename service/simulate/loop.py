"""Virtual time: events in order, each at its moment."""

from __future__ import annotations

import heapq
from collections.abc import Callable

EPOCH = 1_700_000_000.0
"""Wall time at the beginning."""


class Loop:
    """Runs callbacks in order of time; ties in order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Callbacks run so far."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Run `callback` in so many seconds."""
        self._scheduled += 1
        heapq.heappush(self._queue, (self.now + seconds, self._scheduled, callback))

    def run(self, until: Callable[[], bool]) -> bool:
        """Run until the condition holds; False when nothing is left to happen before it does."""
        while not until():
            if not self._queue:
                return False
            self.now, _, callback = heapq.heappop(self._queue)
            self.events += 1
            callback()
        return True


class VirtualClock:
    """The clock of one process; its wall time may be wrong and jump."""

    def __init__(self, loop: Loop, start: float = 0.0) -> None:
        self._loop = loop
        self._start = start
        self.wall_error = 0.0

    def monotonic(self) -> float:
        """Seconds since some moment of this process."""
        return self._loop.now + self._start

    def wall(self) -> float:
        """Unix time, as wrong as it is."""
        return EPOCH + self._loop.now + self.wall_error
