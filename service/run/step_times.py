"""Where the time of the optimizer steps goes: what the trainer as a whole does, and waits for.

driver's states  waiting 6.0 s, step 3.0 s, weights 1.0 s   ->   generation 60%, training 30%, weights 10%
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

GENERATION = "generation"
"""The part of a step for which the trainer waits."""
PARTS = {"waiting": GENERATION, "step": "training", "evaluating": "evaluation"}
"""States of the driver -> parts of a step; the others are parts by their own name."""
RECENT_STEPS = 20


class StepTimes:
    """Seconds of the optimizer steps by part."""

    def __init__(self, seconds: Callable[[], Mapping[str, float]]) -> None:
        """`seconds`: the seconds that the driver has spent in each of its states so far."""
        self._seconds = seconds
        self._before: Counter[str] = Counter()
        self._all: Counter[str] = Counter()
        self._recent: deque[Counter[str]] = deque(maxlen=RECENT_STEPS)

    def begin(self) -> None:
        """Begin the first step."""
        self._before = Counter(self._seconds())

    def stepped(self) -> Counter[str]:
        """End a step and begin the next one; returns the step's seconds by part."""
        now = Counter(self._seconds())
        step = Counter({PARTS.get(state, state): seconds for state, seconds in (now - self._before).items()})
        self._before = now
        self._all.update(step)
        self._recent.append(step)
        return step

    def shares(self) -> dict[str, float]:
        """The fraction of all steps' time of each part, the largest first."""
        return _shares(self._all)

    def recent_shares(self) -> dict[str, float]:
        """The same of the last steps."""
        return _shares(sum(self._recent, Counter[str]()))

    def seconds_of(self, steps: int) -> float | None:
        """Seconds of further steps, if they take as long as the last ones; None before the first step."""
        known = [step.total() for step in self._recent]
        return steps * sum(known) / len(known) if known else None


def _shares(seconds: Counter[str]) -> dict[str, float]:
    total = seconds.total()
    return {part: spent / total for part, spent in seconds.most_common()} if total else {}
