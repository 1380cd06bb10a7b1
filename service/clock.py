"""Clocks are arguments, so that the same code runs in real and in virtual time."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def monotonic(self) -> float:
        """Seconds that never decrease; deadlines are measured in them."""

    def wall(self) -> float:
        """Unix time in seconds; for logs and metrics only."""


class SystemClock(Clock):
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
