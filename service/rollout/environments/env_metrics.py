"""Averages the numbers that environments return as `info` over trajectories, for `metrics.jsonl`.

A generator sums the numbers. After each optimizer step, the driver takes the differences from the sums after the
previous step:

{"search_r1": {"trajectories": 9, "searches": 14.0}}   after step 4
{"search_r1": {"trajectories": 13, "searches": 20.0}}  after step 5: environment/search_r1/searches is 6 / 4 = 1.5
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from service.observe.metrics_table import MAX_INFO_NAMES

TRAJECTORIES = "trajectories"

Sums = dict[str, dict[str, float]]
"""For each environment: the sum of each `info` number over the trajectories, and the number of `trajectories`."""


class EnvMetrics:
    """Sums of the `info` numbers over the trajectories that ended in one generator."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    def add(self, environment: str, info: Mapping[str, float]) -> None:
        """Add the `info` of one ended trajectory; numbers that are not finite are ignored."""
        sums = self.sums.setdefault(environment, {TRAJECTORIES: 0.0})
        sums[TRAJECTORIES] += 1
        for name, value in info.items():
            if name != TRAJECTORIES and math.isfinite(value) and (name in sums or len(sums) <= MAX_INFO_NAMES):
                sums[name] = sums.get(name, 0.0) + value


class EnvMetricMeans:
    """Computes means of the `info` numbers. Each call of `since` covers the trajectories of all generators that ended
    since the previous call."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], Sums] = {}

    def since(self, generators: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        """The means over the trajectories that ended since the previous call, named `environment/<environment>/<name>`.
        A trajectory whose `info` lacks the name counts as 0. `generators`: the status of each generator."""
        new: Sums = {}
        for status in generators:
            # By process id, because the counts of a restarted generator begin at 0.
            generator = status["name"], status["pid"]
            before = self._before.get(generator, {})
            for environment, sums in status["environments"].items():
                added, earlier = new.setdefault(environment, {}), before.get(environment, {})
                for name, value in sums.items():
                    added[name] = added.get(name, 0.0) + value - earlier.get(name, 0.0)
            self._before[generator] = status["environments"]
        return {
            f"environment/{environment}/{name}": value / sums[TRAJECTORIES]
            for environment, sums in new.items()
            if sums[TRAJECTORIES] > 0
            for name, value in sums.items()
            if name != TRAJECTORIES
        }
