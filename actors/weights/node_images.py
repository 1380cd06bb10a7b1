"""Decides from where the engines of a node read the newest weights: from the memory of the ranks if all ranks are on
the node, otherwise from the node's image, which one generator fills for all engines of the node.

    node A   generator-0  fills /proc/71/fd/40#7 <- ranks              generator-1  loads it          (`#7`: inode 7)
    node B   generator-2  fills /proc/35/fd/40#9 <- ranks or node A    generator-3  loads it

With NIXL the generator reads from the memory of the ranks (`nixl_reads.py`); without it the ranks' parts come as Ray
objects, in buckets of bounded size.

An image is a file without a name: it disappears when the process that made it has ended, and when no other process has
it open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.calls import ACTOR_FAILED, call, first_error
from actors.weights.nixl_reads import RemoteMemory
from actors.weights.part import PublishedWeights, Source, WeightBucket, WeightPart
from service.errors import BatonError, Starved

log = logging.getLogger(__name__)

MAX_FAILURES = 2
"""After this many successive publications that could not be read with NIXL, NIXL is not tried any more."""
TRIES = 3
"""The maximum wait for the answer to one call is `weights.sync_deadline` divided by this number."""
BUCKET_BYTES = 64 << 20
"""Maximum size of a bucket."""
AT_ONCE = 2
"""Maximum number of buckets in flight: one that is arriving and one that was requested."""


class Replaced(BatonError):
    """The trainer has newer weights, which are about to be published."""


@dataclass(eq=False)
class NodeImage:
    """What the driver knows about a node's copy of one version of the weights."""

    weights: PublishedWeights
    holder: str
    """Name of the generator that writes and holds the image."""
    generator: Any
    """The actor of the generator `holder`; kept even after the generator has left."""
    path: str | None = None
    """The path from which engines load the image. If it is None after `arrived` was set, and there is no `error`, then
    there are newer weights."""
    error: BaseException | None = None
    """The error because of which the node does not have the weights; None if there was no error."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the image is complete, or when it is clear that the image will not become complete."""


class NodeImages:
    """Lets one generator on each node fill the node's image of the weights."""

    def __init__(
        self,
        generators: Mapping[str, Any],
        trainer: Any,
        deadline: float,
        sent: Callable[[int], None] = lambda n_bytes: None,
    ) -> None:
        """Store the settings. `trainer`: the `actors.trainer.group.TrainerGroup`; `sent` is called with the number of
        bytes that the ranks sent to other hosts."""
        self._generators, self._trainer, self._deadline, self._sent = generators, trainer, deadline, sent
        self.node_of: dict[str, str] = {}
        """The node of each generator that has started."""
        self._held: dict[str, NodeImage] = {}
        """The newest image of each node, by node."""
        self._failures = 0
        """Number of publications since the last one that NIXL brought to all nodes."""
        self._said = ""
        """The last logged text about how weights go to other hosts."""
        self._under_way: set[asyncio.Task[None]] = set()

    def register(self, name: str, node: str) -> None:
        """Note that a generator has started on the node `node`, and forget the images that its earlier process held."""
        self.node_of[name] = node
        self._held = {of: held for of, held in self._held.items() if held.holder != name}

    def begin(self, names: Sequence[str], weights: PublishedWeights) -> None:
        """Begin to send weights to the nodes of these generators, except a node with all ranks."""
        lacking = [name for name in reversed(names) if not self._is_beside(name, weights)]
        self._begin(list({self.node_of[name]: name for name in lacking}.values()), weights)

    def _is_beside(self, name: str, weights: PublishedWeights) -> bool:
        nodes = {self._trainer.nodes[rank] for rank, source in enumerate(weights.sources) if source.part.spans}
        return nodes == {self.node_of[name]}

    async def sources_for(self, name: str, weights: PublishedWeights) -> Sequence[Source] | None:
        """Return the sources from which a generator reads these weights: the memory of the ranks if all ranks are on
        the generator's node, otherwise the image of the node. None: there are newer weights."""
        if self._is_beside(name, weights):
            return weights.sources
        while True:
            held = self._held.get(self.node_of[name])
            if held is not None and held.weights.version > weights.version:
                return None
            if held is None or held.weights is not weights:
                (held,) = self._begin([name], weights)
            await held.arrived.wait()
            if held.error is None:
                whole = WeightPart(((0, sum(weights.sizes)),))
                return None if held.path is None else [Source(whole, held.path)]
            if held.holder == name or not isinstance(held.error, ACTOR_FAILED):
                raise held.error

    def forget(self, name: str) -> None:
        """Forget the image on the node of the generator `name`: the generator that held the image has ended, so others
        cannot open it."""
        self._held.pop(self.node_of[name], None)

    def _begin(self, names: Sequence[str], weights: PublishedWeights) -> list[NodeImage]:
        begun = [NodeImage(weights, name, self._generators[name]) for name in names]
        self._held |= {self.node_of[held.holder]: held for held in begun}
        if begun:
            task = asyncio.ensure_future(self._send(weights, begun))
            self._under_way.add(task)  # the event loop itself keeps only a weak reference
            task.add_done_callback(self._under_way.discard)
        return begun

    async def _send(self, weights: PublishedWeights, begun: Sequence[NodeImage]) -> None:
        try:
            if unread := await self._read(weights, begun):
                await self._send_buckets(weights, unread)
            self._sent(sum(weights.sizes) * sum(held.error is None for held in begun))
        except Replaced:
            for held in begun:
                held.path = None
        except Exception as error:  # noqa: BLE001 - raised to all who wait for an image
            for held in begun:
                held.error = error
        for held in begun:
            if held.error is not None:
                self._held = {node: other for node, other in self._held.items() if other is not held}
            held.arrived.set()

    async def _read(self, weights: PublishedWeights, begun: Sequence[NodeImage]) -> list[NodeImage]:
        if self._failures >= MAX_FAILURES:
            return [*begun]
        answers = await self._trainer.remotes()
        reasons = {why for remote, why in answers if remote is None}
        if not reasons:
            remotes = [remote for remote, _ in answers if remote is not None]
            reasons = {*await asyncio.gather(*(self._read_one(held, remotes) for held in begun))} - {""}
        self._failures = self._failures + 1 if reasons else 0
        way = "through Ray's object store: " + "; ".join(sorted(reasons)) if reasons else "with NIXL"
        if way != self._said:
            log.info("weights go to other hosts %s", way)
            self._said = way
        return [held for held in begun if held.path is None and held.error is None]

    async def _read_one(self, held: NodeImage, remotes: Sequence[RemoteMemory]) -> str:
        within = held.weights.seconds(self._deadline) / TRIES
        arguments = held.weights.version.pack(), held.weights.sources, remotes, within
        try:
            read = await call(held.generator.read_image, *arguments, who=held.holder, within=2 * within)
            held.path, reason = read
        except Starved as late:  # NIXL itself may hang, in a thread of the generator
            return str(late)
        except ACTOR_FAILED as error:
            held.error = error
            return ""
        return str(reason)

    async def _send_buckets(self, weights: PublishedWeights, images: Sequence[NodeImage]) -> None:
        at_once, within, version = asyncio.Semaphore(AT_ONCE), self._deadline / TRIES, weights.version.pack()

        async def write(held: NodeImage, bucket: WeightBucket, message: Any) -> None:
            try:
                if held.path is None:
                    of = version, sum(weights.sizes)
                    held.path = await call(held.generator.hold_image, *of, who=held.holder, within=within)
                await call(held.generator.write_image, version, bucket, message, who=held.holder, within=within)
            except ACTOR_FAILED as error:
                held.error = error

        async def send(rank: int, start: int, stop: int) -> None:
            async with at_once:
                found = await self._trainer.bucket(weights.version, rank, start, stop)
                if found is None:
                    raise Replaced(f"newer weights than those of version {weights.version} are about to be published")
                await asyncio.gather(*(write(held, *found) for held in images if held.error is None))

        try:
            async with asyncio.TaskGroup() as sending:
                for rank, n_bytes in enumerate(weights.sizes):
                    for start in range(0, n_bytes, BUCKET_BYTES):
                        sending.create_task(send(rank, start, min(start + BUCKET_BYTES, n_bytes)))
        except BaseExceptionGroup as group:
            raise first_error(group) from group
