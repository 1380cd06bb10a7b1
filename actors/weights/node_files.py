"""One file of the newest weights a node: whoever asks first writes it, and every engine of the node maps it.

    node A   generator-0  writes /proc/71/fd/40 <- object store      generator-1  maps it
    node B   generator-2  writes /proc/35/fd/40 <- object store      generator-3  maps it

The file has no name and vanishes with its holder, so nothing is left behind; who has it open keeps it all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray.exceptions

from actors.calls import call
from actors.trainer.actor import PublishedWeights
from service.errors import BatonError

HOLDER_FAILED = (ray.exceptions.RayActorError, BatonError)


@dataclass
class Held:
    """A file of some weights, while somebody needs it."""

    weights: PublishedWeights
    holder: str
    path: asyncio.Future[str]
    users: int = 0


class NodeFiles:
    """Which generator holds the file of its node."""

    def __init__(self, generators: Mapping[str, Any], deadline: float) -> None:
        self._generators = generators
        self._deadline = deadline
        self._node_of: dict[str, str] = {}
        self._held: dict[str, Held] = {}

    def runs_on(self, name: str, node: str) -> None:
        """A generator is up, on this node; what an earlier process of it held is gone."""
        self._node_of[name] = node
        self._held = {of: held for of, held in self._held.items() if held.holder != name}

    @asynccontextmanager
    async def path_for(self, name: str, weights: PublishedWeights) -> AsyncIterator[str]:
        """The path of a generator's node's file of these weights, which is kept meanwhile."""
        held = await self._found_or_written(name, weights)
        try:
            yield held.path.result()
        finally:
            held.users -= 1
            if not held.users:
                await self._release(self._node_of[name], held)

    def forget(self, name: str) -> None:
        """A generator could not open its node's file: the holder is gone."""
        self._held.pop(self._node_of[name], None)

    async def _found_or_written(self, name: str, weights: PublishedWeights) -> Held:
        node = self._node_of[name]
        while True:
            held = self._held.get(node)
            if held is None or held.weights is not weights:
                hold = self._generators[name].hold_weights
                path = asyncio.ensure_future(
                    call(hold, weights.data, weights.checksum, who=name, within=self._deadline)
                )
                held = self._held[node] = Held(weights, name, path)
            held.users += 1
            try:
                await asyncio.shield(held.path)
                return held
            except HOLDER_FAILED:
                if self._held.get(node) is held:
                    del self._held[node]
                if held.holder == name:
                    raise
            except asyncio.CancelledError:
                held.users -= 1
                raise

    async def _release(self, node: str, held: Held) -> None:
        if self._held.get(node) is held:
            del self._held[node]
        try:
            await call(self._generators[held.holder].release_weights, held.path.result(), who=held.holder)
        except HOLDER_FAILED:
            return  # and its file with it
