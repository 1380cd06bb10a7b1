"""How many groups may be open in an engine, by how full its KV cache is.

Where the KV cache cannot hold all requests at their longest, vLLM preempts some of them and computes them again later.
Fewer open groups then finish sooner than many that preempt each other.
"""

from __future__ import annotations

from typing import NamedTuple

SHRINK_FACTOR = 0.75
"""Fraction of the open groups that may stay open after a preemption."""
ROOM_RATIO = 0.8
"""Fraction of the KV cache in use below which one more group may open."""


class EngineLoad(NamedTuple):
    """How busy an engine is."""

    running: int
    """Requests in the batch."""
    waiting: int
    """Requests that wait for a place in the batch."""
    kv_cache_ratio: float
    """Fraction of the KV cache in use."""
    preemptions: int
    """Requests preempted so far."""


class GroupLimit:
    """How many groups may be open: a quarter fewer after a preemption, one more while the KV cache has room.

    >>> limit = GroupLimit(8)
    >>> limit.observe(EngineLoad(60, 4, 1.0, preemptions=3), open_groups=8)
    6
    >>> limit.observe(EngineLoad(48, 0, 0.7, preemptions=3), open_groups=6)
    7
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._preemptions = 0
        self.groups = most

    def observe(self, load: EngineLoad, open_groups: int) -> int:
        """Adapt the limit to the engine's load, and return it."""
        overflowed = load.preemptions > self._preemptions
        self._preemptions = load.preemptions
        if overflowed:
            self.groups = max(1, int(SHRINK_FACTOR * min(self.groups, open_groups)))
        elif load.kv_cache_ratio < ROOM_RATIO and open_groups >= self.groups:
            self.groups = min(self._most, self.groups + 1)
        return self.groups
