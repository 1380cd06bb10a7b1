"""Limits the open groups of an engine, depending on how full its KV cache is.

If the KV cache cannot hold all requests at their full length, vLLM preempts some and computes them again later.
A few open groups then finish sooner than many that preempt each other.
"""

from __future__ import annotations

import math

from actors.engine.engine_load import EngineLoad
from service.config import Config

SHRINK_FACTOR = 0.75
"""Factor by which the limit of open groups shrinks after a preemption."""
ROOM_RATIO = 0.8
"""If less than this fraction of the KV cache is in use, one more group may open."""


class GroupLimit:
    """The limit of open groups: it shrinks by a quarter after a preemption, and grows by one while the KV cache has
    room.

    >>> limit = GroupLimit(8)
    >>> limit.observe(EngineLoad(60, 4, 1.0, preemptions=3), open_groups=8)
    6
    >>> limit.observe(EngineLoad(48, 0, 0.7, preemptions=3), open_groups=6)
    7
    """

    def __init__(self, most: int, at_once: float = 1.0) -> None:
        """Begin with a limit of `most` groups, which is also the maximum. `at_once`: the fraction of `most` that one
        claim may ask for."""
        self._most = most
        self._at_once = at_once
        self._preemptions = 0
        self.groups = most

    @staticmethod
    def of(config: Config) -> GroupLimit:
        """Return the limit of a generator. At first it is an equal share of `generator.concurrent_groups` for each
        of `generator.engines` (or its `min`). A claim asks for at most an equal share of a mini-batch."""
        generator = config.generator
        at_once = config.trainer.mini_batch_size / generator.concurrent_groups
        return GroupLimit(-(-generator.concurrent_groups // generator.min_engines), at_once)

    def room(self, open_groups: int) -> int:
        """Return the number of groups to ask for in one claim: at least 1. (The caller has checked that there is room
        for another group.)"""
        return max(1, min(self.groups - open_groups, math.ceil(self._at_once * self._most)))

    def share(self, most: int) -> None:
        """Set the maximum of open groups to `most`, because there are more or fewer generators."""
        self.groups = most if self.groups == self._most else min(self.groups, most)
        self._most = most

    def observe(self, load: EngineLoad, open_groups: int) -> int:
        """Adapt the limit to the engine's load, and return it."""
        overflowed = load.preemptions > self._preemptions
        self._preemptions = load.preemptions
        if overflowed:
            self.groups = max(1, int(SHRINK_FACTOR * min(self.groups, open_groups)))
        elif load.kv_cache_ratio < ROOM_RATIO and open_groups >= self.groups:
            self.groups = min(self._most, self.groups + 1)
        return self.groups
