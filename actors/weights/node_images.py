"""Where the engines of a node read the newest weights: in the memory of the ranks, if the ranks are on the node;
otherwise in the node's image, which one generator writes as the weights arrive.

    node A   generator-0  writes /proc/71/fd/40#7 <- ranks     generator-1  loads it          (`#7`: inode 7)
    node B   generator-2  writes /proc/35/fd/40#9 <- node A    generator-3  loads it

An image is a file without a name: it disappears when the process that made it has ended, and when no other process has
it open. With `weights.delta` a node keeps its image, and the next update changes the image in place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from actors.calls import ACTOR_FAILED, call, may_be_dropped
from actors.weights.chain import Replaced, WeightChain
from actors.weights.memory import Place
from actors.weights.part import WeightPart
from actors.weights.pulled import Source
from actors.weights.weight_source import PublishedWeights, WeightSource
from service.config import WeightsConfig
from service.errors import Starved
from service.types import PolicyVersion


@dataclass
class NodeImage:
    """A node's image of some weights, as the driver knows it."""

    weights: PublishedWeights
    holder: str
    """Name of the generator that writes and holds the image."""
    number: int
    path: asyncio.Future[str | None] = field(default_factory=asyncio.Future)
    """Where engines load the image, once it is whole; None: the trainer has newer weights."""
    users: int = 1
    may_change: bool = True
    """Whether the next update may change the image in place."""

    @property
    def is_whole(self) -> bool:
        """Return whether engines can load it."""
        return self.path.done() and self.path.exception() is None and self.path.result() is not None


class NodeImages:
    """Keeps track of which generator holds the image of its node."""

    def __init__(
        self,
        config: WeightsConfig,
        generators: Mapping[str, Any],
        trainer: WeightSource,
        report: Callable[[int, float | None], None] = lambda n_bytes, changed: None,
    ) -> None:
        """Store the settings; `report` is called with the bytes that left the ranks, and the fraction of elements
        that changed."""
        self._generators, self._trainer, self._report = generators, trainer, report
        self._deadline, self._keeps, self._by_memory = config.sync_deadline, config.delta, config.transport == "memory"
        self._node_of: dict[str, str] = {}
        self._held: dict[str, NodeImage] = {}
        """By node."""
        self._numbers = count()
        self._under_way: set[asyncio.Task[None]] = set()

    def register(self, name: str, node: str) -> None:
        """Note that a generator has started on this node; the images that its earlier process held have vanished."""
        self._node_of[name] = node
        self._held = {of: held for of, held in self._held.items() if held.holder != name}

    def node_of(self, name: str) -> str:
        """Return the node of a generator that has started."""
        return self._node_of[name]

    @asynccontextmanager
    async def spread(
        self, names: Sequence[str], version: PolicyVersion, weights: PublishedWeights
    ) -> AsyncIterator[None]:
        """Send weights to the nodes of these generators, from one to the next; the images are held while the block
        runs.

        Transports other than `memory` have no images.
        """
        lacking = [name for name in reversed(names) if self._by_memory and not self._is_beside(name, weights)]
        one_a_node = {self._node_of[name]: name for name in lacking}
        all_held = self._begin(list(one_a_node.values()), version, weights)
        try:
            yield
        finally:
            await asyncio.gather(*(self._let_go(held) for held in all_held))

    def _is_beside(self, name: str, weights: PublishedWeights) -> bool:
        """Return whether a generator is on the host of every rank that holds a part."""
        nodes = {self._trainer.nodes[rank] for rank, source in enumerate(weights.sources) if source.part.spans}
        return nodes == {self._node_of[name]}

    @asynccontextmanager
    async def sources_for(
        self, name: str, version: PolicyVersion, weights: PublishedWeights
    ) -> AsyncIterator[Sequence[Source] | None]:
        """Yield where a generator reads these weights: in the memory of the ranks if all are on its node, else in the
        image of its node; see `path_for`."""
        if self._is_beside(name, weights):
            yield weights.sources
            return
        whole = WeightPart(((0, sum(part.n_bytes for part in weights.parts)),))
        async with self.path_for(name, version, weights) as path:
            yield None if path is None else [Source(Place(path, stays=self._keeps), whole)]

    @asynccontextmanager
    async def path_for(self, name: str, version: PolicyVersion, weights: PublishedWeights) -> AsyncIterator[str | None]:
        """Yield the path of these weights on the generator's node, or None if newer ones are about to be
        published; the image is held while the block runs."""
        held = await self._hold(name, version, weights)
        try:
            yield held.path.result()
        except (Starved, asyncio.CancelledError):
            held.may_change = False  # the engine may still load from it, long after
            raise
        finally:
            await self._let_go(held)

    def forget(self, name: str) -> None:
        """Forget a node's image that a generator could not open, because its holder has ended."""
        self._held.pop(self._node_of[name], None)

    async def _hold(self, name: str, version: PolicyVersion, weights: PublishedWeights) -> NodeImage:
        while True:
            held = self._held.get(self._node_of[name])
            if held is None or held.weights is not weights:
                (held,) = self._begin([name], version, weights)
            else:
                held.users += 1
            try:
                await asyncio.shield(held.path)
                return held
            except ACTOR_FAILED:
                if held.holder == name:
                    raise
            except asyncio.CancelledError:
                await self._let_go(held)
                raise

    def _begin(self, names: Sequence[str], version: PolicyVersion, weights: PublishedWeights) -> list[NodeImage]:
        """Begin to send weights to the nodes of these generators, one generator per node; each image then has one
        user."""
        begun, kept = list[NodeImage](), dict[str, str]()
        for name in names:
            held, before = NodeImage(weights, name, next(self._numbers)), self._held.get(self._node_of[name])
            self._held[self._node_of[name]] = held
            if before is not None and not before.users and before.is_whole and before.holder in self._generators:
                if before.weights.parts == weights.parts:
                    held.holder, held.number = before.holder, before.number
                    kept[held.holder] = str(before.path.result())
                else:  # restarted ranks may have other rows, which that image would put elsewhere
                    self._in_background(self._settle(before))
            begun.append(held)
        if begun:
            numbers = {held.holder: held.number for held in begun}
            ways = [self._way([*numbers], node) for node in self._trainer.nodes]
            chain = WeightChain(self._generators, self._trainer, numbers, kept, ways, self._deadline)
            self._in_background(self._send(chain, begun, version, weights))
        return begun

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._under_way.add(task)  # the event loop itself keeps only a weak reference
        task.add_done_callback(self._under_way.discard)

    def _way(self, names: Sequence[str], node: str) -> list[str]:
        """Return these generators in a ring, beginning with that of the rank's own node, which does not use the
        rank's network link."""
        nodes = [self._node_of[name] for name in names]
        at = nodes.index(node) if node in nodes else 0
        return [*names[at:], *names[:at]]

    async def _send(
        self, chain: WeightChain, begun: Sequence[NodeImage], version: PolicyVersion, weights: PublishedWeights
    ) -> None:
        """Fill these images; at the end each has a path or an error."""
        try:
            self._report(*await chain.send(version, weights.parts))
        except Replaced:
            chain.paths.clear()
        except Exception as error:  # noqa: BLE001 - raised to all who wait for a path
            chain.lost |= {held.holder: error for held in begun}
        for held in begun:
            if (why := chain.lost.get(held.holder)) is None:
                held.path.set_result(chain.paths.get(held.holder))
            else:
                # at once, because a caller that retries before `_settle` would get the same error repeatedly
                self._held = {node: other for node, other in self._held.items() if other is not held}
                held.path.set_exception(why)
                may_be_dropped(held.path)  # all who wait for it may be cancelled
        unused = [held for held in begun if held.path.exception() is not None or not held.users]
        await asyncio.gather(*(self._settle(held) for held in unused))

    async def _let_go(self, held: NodeImage) -> None:
        held.users -= 1
        if not held.users and held.path.done() and held.path.exception() is None:
            await self._settle(held)

    async def _settle(self, held: NodeImage) -> None:
        """Keep an image that no engine loads from, or release it."""
        node = self._node_of[held.holder]
        if self._held.get(node) is held:
            if self._keeps and held.is_whole and held.may_change:
                return
            del self._held[node]
        if (holder := self._generators.get(held.holder)) is None:
            return  # it has left, and its images with it
        with suppress(*ACTOR_FAILED):  # the image is gone with its holder
            await call(holder.release_image, held.number, who=held.holder)
