"""What environments say of their trajectories in `info`, as means in `metrics.jsonl`.

A generator sums, the driver compares what it says after each optimizer step with what it said after the step before:

{"search_r1": {"trajectories": 9, "searches": 14.0}}   after step 4
{"search_r1": {"trajectories": 13, "searches": 20.0}}  after step 5: environment/search_r1/searches is 6 / 4 = 1.5
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

MOST_NAMES = 64
"""Names of one environment that are kept: one that makes names up would grow without end."""
TRAJECTORIES = "trajectories"

Sums = dict[str, dict[str, float]]
"""By environment: how many trajectories ended, and what each name of their `info` sums up to."""


class Told:
    """Sums what environments said of the trajectories that ended."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    def add(self, environment: str, facts: Mapping[str, float]) -> None:
        """Another trajectory ended; a number that is not finite says nothing."""
        sums = self.sums.setdefault(environment, {TRAJECTORIES: 0.0})
        sums[TRAJECTORIES] += 1
        for name, value in facts.items():
            if name != TRAJECTORIES and math.isfinite(value) and (name in sums or len(sums) <= MOST_NAMES):
                sums[name] = sums.get(name, 0.0) + value


class Means:
    """Turns the sums of all generators into means over the trajectories that ended since the last time."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], Sums] = {}

    def since(self, generators: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        """`environment/<environment>/<name>`; where a name was not given it counts as 0."""
        new: Sums = {}
        for status in generators:
            # One that was started again counts from 0.
            who = status["name"], status["pid"]
            before = self._before.get(who, {})
            for environment, sums in status["environments"].items():
                held, earlier = new.setdefault(environment, {}), before.get(environment, {})
                for name, value in sums.items():
                    held[name] = held.get(name, 0.0) + value - earlier.get(name, 0.0)
            self._before[who] = status["environments"]
        return {
            f"environment/{environment}/{name}": value / sums[TRAJECTORIES]
            for environment, sums in new.items()
            if sums[TRAJECTORIES] > 0
            for name, value in sums.items()
            if name != TRAJECTORIES
        }
