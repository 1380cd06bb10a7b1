"""How full an engine is, and how many groups may therefore be open in it.

Where the KV cache cannot hold all requests at their longest, vLLM preempts some of them and computes them again later.
Fewer groups at once then finish sooner than many that push each other out.
"""

from __future__ import annotations

from typing import NamedTuple

SHRINK = 0.75
"""Share of the open groups that may stay open after a preemption."""
ROOM_RATIO = 0.8
"""Share of the KV cache below which there is room for another group."""


class EngineLoad(NamedTuple):
    """What an engine has to do."""

    running: int
    """Requests in the batch."""
    waiting: int
    """Requests that wait for a place in it."""
    kv_cache_ratio: float
    """Share of the KV cache in use."""
    preemptions: int
    """Requests that were pushed out so far."""


class GroupLimit:
    """How many groups may be open: fewer by a quarter when the cache overflowed, one more while there is room.

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
        """The limit after a look at the engine."""
        overflowed = load.preemptions > self._preemptions
        self._preemptions = load.preemptions
        if overflowed:
            self.groups = max(1, int(SHRINK * min(self.groups, open_groups)))
        elif load.kv_cache_ratio < ROOM_RATIO and open_groups >= self.groups:
            self.groups = min(self._most, self.groups + 1)
        return self.groups
