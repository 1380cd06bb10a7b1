"""The quick start's environment with calls that take time, like calls of tools."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

from baton.examples import lookup
from baton.examples.lookup import demonstrations as demonstrations
from baton.examples.lookup import vocabulary as vocabulary
from service.rollout.environment import StepResult

MEDIAN_SECONDS = 0.15
SIGMA = 0.6
MIN_SECONDS, MAX_SECONDS = 0.05, 0.5

_drawn = random.Random(0)


class SlowLookup(lookup.Lookup):
    """`Lookup`; each step takes a lognormal time, clipped to `MIN_SECONDS` and `MAX_SECONDS`."""

    async def step(self, text: str) -> StepResult:
        """Answer after a random delay."""
        seconds = _drawn.lognormvariate(math.log(MEDIAN_SECONDS), SIGMA)
        await asyncio.sleep(min(max(seconds, MIN_SECONDS), MAX_SECONDS))
        return await super().step(text)


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """The rows of `lookup`, for the environment that the configuration names."""
    return [{**row, "env_class": ""} for row in lookup.rows(n, seed)]
