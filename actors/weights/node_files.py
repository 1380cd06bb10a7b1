"""One shared-memory file of the newest weights a node: the first generator that asks writes it, all engines map it.

    node A   generator-0  writes /proc/71/fd/40 <- object store      generator-1  maps it
    node B   generator-2  writes /proc/35/fd/40 <- object store      generator-3  maps it

The file has no name and vanishes with the process that holds it, so nothing is left behind. A process that has opened
the file keeps it all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray.exceptions

from actors.calls import call, may_be_dropped
from actors.weights.checksum import PublishedWeights
from service.errors import BatonError

HOLDER_FAILED = (ray.exceptions.RayActorError, BatonError)


@dataclass
class HeldFile:
    """A file of some weights, while engines load from it."""

    weights: PublishedWeights
    holder: str
    """Name of the generator that writes and holds the file."""
    path: asyncio.Future[str]
    users: int = 0


class NodeFiles:
    """Which generator holds the file of its node."""

    def __init__(self, generators: Mapping[str, Any], deadline: float) -> None:
        self._generators = generators
        self._deadline = deadline
        self._node_of: dict[str, str] = {}
        self._held: dict[str, HeldFile] = {}
        """By node."""

    def register(self, name: str, node: str) -> None:
        """A generator has started on this node; the files that its earlier process held are gone."""
        self._node_of[name] = node
        self._held = {of: held for of, held in self._held.items() if held.holder != name}

    def node_of(self, name: str) -> str:
        """The node of a generator that has started."""
        return self._node_of[name]

    @asynccontextmanager
    async def path_for(self, name: str, weights: PublishedWeights) -> AsyncIterator[str]:
        """The path of these weights on the generator's node; the file is held while the block runs."""
        held = await self._hold(name, weights)
        try:
            yield held.path.result()
        finally:
            held.users -= 1
            if not held.users:
                await self._release(self._node_of[name], held)

    def forget(self, name: str) -> None:
        """The generator could not open its node's file, because the holder is gone."""
        self._held.pop(self._node_of[name], None)

    async def _hold(self, name: str, weights: PublishedWeights) -> HeldFile:
        node = self._node_of[name]
        while True:
            held = self._held.get(node)
            if held is None or held.weights is not weights:
                hold = self._generators[name].hold_weights
                path = asyncio.ensure_future(
                    call(hold, weights.data, weights.checksum, who=name, within=self._deadline)
                )
                may_be_dropped(path)  # all who wait for it may be cancelled
                held = self._held[node] = HeldFile(weights, name, path)
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

    async def _release(self, node: str, held: HeldFile) -> None:
        if self._held.get(node) is held:
            del self._held[node]
        if (holder := self._generators.get(held.holder)) is None:
            return  # it has left, and its files with it
        try:
            await call(holder.release_weights, held.path.result(), who=held.holder)
        except HOLDER_FAILED:
            return  # the file is gone with its holder
