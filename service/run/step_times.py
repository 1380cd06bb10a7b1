"""Where the time of the optimizer steps goes: what the trainer as a whole does, and waits for.

driver's states  waiting 6.0 s, step 3.0 s, weights 1.0 s   ->   generation 60%, training 30%, weights 10%
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

GENERATION = "generation"
"""The part of a step for which the trainer waits."""
PARTS = {"waiting": GENERATION, "step": "training", "evaluating": "evaluation"}
"""States of the driver -> parts of a step; any other state is a part of the same name."""


class StepTimes:
    """Seconds of the optimizer steps by part."""

    def __init__(self, states: Callable[[], Mapping[str, float]]) -> None:
        """`states`: the seconds that the driver has spent in each of its states so far."""
        self._states = states
        self._before: Counter[str] = Counter()
        self._all: Counter[str] = Counter()

    def begin(self) -> None:
        """Begin the first step."""
        self._before = Counter(self._states())

    def stepped(self) -> Counter[str]:
        """End a step and begin the next one; returns the step's seconds by part."""
        now = Counter(self._states())
        step = Counter({PARTS.get(state, state): seconds for state, seconds in (now - self._before).items()})
        self._before, self._all = now, self._all + step
        return step

    def shares(self) -> dict[str, float]:
        """The fraction of the steps' time of each part, the largest first."""
        return {part: seconds / self._all.total() for part, seconds in self._all.most_common()}
