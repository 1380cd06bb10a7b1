"""Lets generators join a run while there are fewer than the maximum, and leave it when their node is drained.

at most 3, 2 are there      room for a third one -> its engine starts -> newest weights -> it claims groups
a node is drained           its generators hand over and end before the node ends; others join if there is room
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from ray.util.placement_group import PlacementGroup

from actors.calls import ACTOR_FAILED, in_a_line, may_be_dropped
from actors.generator.generator_pool import GeneratorPool
from service.config import RunConfig
from service.config.rollout import GeneratorConfig
from service.errors import RunFailed

PAUSE_SECONDS = 15.0
"""Seconds from a failed try to let a generator join to the next try."""
MARGIN_SECONDS = 5.0
"""Seconds before a node's end at which its generators begin to hand over their open trajectories."""


class Placed(NamedTuple):
    """The actor of a generator that joins, and its placement group."""

    generator: Any
    room: PlacementGroup


class Scaling:
    """Lets generators join and leave a pool."""

    def __init__(
        self,
        generator: GeneratorConfig,
        run: RunConfig,
        transport: str,
        pool: GeneratorPool,
        place: Callable[[int], Awaitable[Placed]],
        say: Callable[[str], None],
    ) -> None:
        """Store the settings. `place` makes the generator with a given number as soon as there is room."""
        self._pool, self._place, self._say = pool, place, say
        self._grace, self._least, self._most = generator.leave_grace, generator.min_engines, generator.max_engines
        self._max_failures = run.max_restarts
        self._fixed = transport == "ipc"
        self._joining: asyncio.Task[None] | None = None
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """The task of each generator that leaves. (The pool counts a generator as leaving only once its task has
        begun.)"""
        self._failures = 0
        self._next_try = 0.0

    def stop(self) -> None:
        """From now on, let no generator join or leave."""
        for task in (*self._leaving.values(), *filter(None, [self._joining])):
            may_be_dropped(task)
            task.cancel()

    def look(self, draining: dict[str, int]) -> None:
        """Let the generators of drained nodes leave, and new generators join while there is room. `draining`: by
        drained node, the Unix time in ms at which the node ends; 0: unknown.

        Raises:
            RunFailed: there are too few generators, and joining failed more than `run.max_restarts` times in a row.
        """
        if self._fixed:  # an engine that shares the GPU of a rank has no other place
            return
        for left in [name for name, leaving in self._leaving.items() if leaving.done()]:
            self._leaving.pop(left).result()
        there = {name: node for name, node in self._pool.nodes().items() if name not in self._leaving}
        for name, node in there.items():
            if node in draining:
                self._say(f"{name} leaves: its node is drained")
                self._leaving[name] = asyncio.ensure_future(self._pool.leave(name, self._within(draining[node])))
        if self._joining is not None and self._joining.done():
            self._joining.result()
            self._joining = None
        n_staying = sum(node not in draining for node in there.values())
        if self._joining is None and n_staying < self._most and time.monotonic() >= self._next_try:
            self._joining = asyncio.ensure_future(self._join(self._pool.free_number()))

    def _within(self, ends_at: int) -> float:
        left = ends_at / 1000 - time.time() - MARGIN_SECONDS
        return max(min(self._grace, left), 0.0) if ends_at else self._grace

    async def _join(self, number: int) -> None:
        try:
            placed = await self._place(number)
            self._say(f"generator-{number} starts: up to {self._most} generators may run")
            await self._pool.join(f"generator-{number}", *placed)
            self._failures = 0
        except ACTOR_FAILED as error:
            self._failures += 1
            if self._failures > self._max_failures and len(self._pool.nodes()) < self._least:
                raise RunFailed(f"{self._failures} generators could not join; the last: {in_a_line(error)}") from error
            self._say(f"generator-{number} could not join ({in_a_line(error)}); it is tried again")
            self._next_try = time.monotonic() + PAUSE_SECONDS
