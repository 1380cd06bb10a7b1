"""How many mini-batches may be open beyond the served version: a number, or the smallest that keeps the trainer busy.

`auto` measures windows of a few optimizer steps. One is added when the trainer waited more than the target while claims
waited for lookahead. One less is tried when the trainer waited far less; a number that was too small is remembered.
"""

from __future__ import annotations

from typing import Literal

from service.clock import Clock

TARGET_FRACTION = 0.05
"""Fraction of the time that the trainer may wait."""
CALM = 0.5
"""Fraction of the target below which one less is tried."""
PATIENT_WINDOWS = 20
"""Windows after which a number that was too small is tried again, because the work may have changed."""


class Lookahead:
    """The current number."""

    def __init__(self, setting: int | Literal["auto"], minimum: int, maximum: int, clock: Clock) -> None:
        """`minimum` and `maximum` bound the number of `auto`."""
        self._auto = setting == "auto"
        self._minimum, self._maximum = minimum, maximum
        self.value = minimum if setting == "auto" else setting
        self._clock = clock
        self._too_small = 0
        """The largest number with which the trainer was starved; 0 when there is none."""
        self._windows_since = 0
        self._begin_window()

    def blocked(self) -> None:
        """A claim had to wait for the served version."""
        self._was_blocked = True

    def trainer_waited(self, seconds: float) -> None:
        """The trainer waited so many seconds for its mini-batch."""
        self._waited += seconds

    def committed(self) -> None:
        """An optimizer step was made."""
        self._steps += 1
        if self._auto and self._steps >= 2 * (self.value + 1):
            self._judge()
            self._begin_window()

    def _judge(self) -> None:
        waiting_fraction = self._waited / max(self._clock.monotonic() - self._began, 1e-9)
        self._windows_since += 1
        if waiting_fraction > TARGET_FRACTION and self._was_blocked:
            self._too_small, self._windows_since = self.value, 0
            self.value = min(self.value + 1, self._maximum)
        elif waiting_fraction < CALM * TARGET_FRACTION and self.value > self._minimum:
            known = self.value - 1 <= self._too_small and self._windows_since < PATIENT_WINDOWS
            self.value -= 0 if known else 1

    def _begin_window(self) -> None:
        self._began = self._clock.monotonic()
        self._waited, self._steps, self._was_blocked = 0.0, 0, False
