"""Clocks as arguments of functions and classes, so that the same code runs in real time and in simulated time."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def monotonic(self) -> float:
        """Seconds that never decrease, for deadlines and durations."""

    def wall(self) -> float:
        """Unix time in seconds, for logs and metrics only."""


class SystemClock(Clock):
    """The clock of this machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
