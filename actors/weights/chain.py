"""Sends one publication of the weights from the ranks to several nodes. Each node receives the weights once, and passes
them on to the next node.

At one moment, for example, three buckets of each rank are on their way:

    rank 0 on node A   --bucket 2--> node A --bucket 1--> node B --bucket 0--> node C
    rank 1 on node B   --bucket 2--> node B --bucket 1--> node C --bucket 0--> node A

Each rank sends its own part. The network links of the ranks carry one copy of the weights, whatever the number of
nodes. The last node finishes a few buckets after the first node. A node passes a bucket on as a new object of Ray's
store, because Ray might fetch the original object from any node that holds it, including the node of the rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import ray.exceptions

from actors.calls import ACTOR_FAILED, answer, call, first_error
from actors.weights.nixl_reads import RemoteMemory
from actors.weights.part import WeightBucket
from actors.weights.weight_source import PublishedWeights, WeightSource
from service.errors import BatonError, Starved

TRIES = 3
"""The maximum wait for the answer to one call is `weights.sync_deadline` divided by this number."""
BUCKETS = 64
"""Number of buckets of a publication; more or fewer if a bucket's size would be outside of `MIN_BYTES` to
`MAX_BYTES`."""
MIN_BYTES, MAX_BYTES = 1 << 20, 64 << 20
"""Minimum and maximum size of a bucket, in bytes."""
AT_ONCE = 2
"""Maximum number of buckets in flight to a node: one that is arriving and one that was requested."""

NOT_PASSED_ON = (ray.exceptions.ObjectLostError, Starved)
"""Errors of a call that may have failed because its argument did not arrive."""


class Replaced(BatonError):
    """The trainer has newer weights, which are about to be published."""


@dataclass(eq=False)
class NodeImage:
    """What the driver knows about a node's copy of one version of the weights: the generator that holds the copy, its
    path, and whether it is complete."""

    weights: PublishedWeights
    holder: str
    """Name of the generator that writes and holds the image."""
    generator: Any
    """The actor of the generator `holder`; kept even after the generator has left."""
    number: int
    users: int = 1
    path: str | None = None
    """The path from which engines load the image. If it is None after `arrived` was set, and there is no `error`, then
    there are newer weights."""
    remote: RemoteMemory | None = None
    """The memory from which other nodes read the image, if the image was read with NIXL."""
    unread: str = ""
    """Why the weights could not be read with NIXL; empty if they were read, or NIXL was not tried."""
    error: BaseException | None = None
    """The error because of which the node does not have the weights; None if there was no error."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the image is complete, or when it is clear that the image will not become complete."""


class WeightChain:
    """Sends one publication of the weights from node to node; each node writes the buckets into its image."""

    def __init__(
        self,
        trainer: WeightSource,
        weights: PublishedWeights,
        ways: Sequence[Sequence[NodeImage]],
        deadline: float,
    ) -> None:
        """Store the settings. `ways`: for each rank, the order in which the images get its part."""
        self._trainer, self._weights, self._ways = trainer, weights, ways
        self._within = deadline / TRIES
        self._hops = {image: asyncio.Semaphore(AT_ONCE) for image in ways[0]}
        self._mute = set[NodeImage]()
        """Images from whose nodes a bucket did not reach the next node; no further bucket is taken from these nodes."""

    async def send(self) -> None:
        """Send the weights file to all nodes.

        Raises:
            Replaced: the trainer has newer weights.
            TrainerLost: a rank does not answer.
        """
        under_way = asyncio.Semaphore(AT_ONCE * (len(self._hops) + 1))
        try:
            async with asyncio.TaskGroup() as trips:
                for rank, start, stop in bounds_of_buckets(self._weights.sizes):
                    await under_way.acquire()
                    trip = trips.create_task(self._trip(rank, start, stop))
                    trip.add_done_callback(lambda done: under_way.release())
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    async def _trip(self, rank: int, start: int, stop: int) -> None:
        """Send one bucket to every node that is not lost."""
        version = self._weights.version
        if (found := await self._trainer.bucket(version, rank, start, stop)) is None:
            raise Replaced(f"newer weights than those of version {version} are about to be published")
        bucket, from_rank = found
        source, giver = from_rank, None
        way = self._ways[rank]
        for image in way:
            async with self._hops[image]:
                if image.error is not None:
                    continue
                try:
                    try:
                        copy = await self._give(image, bucket, source, image is not way[-1])
                    except NOT_PASSED_ON:
                        if giver is None:
                            raise
                        self._mute.add(giver)
                        copy = await self._give(image, bucket, from_rank, image is not way[-1])
                    if image not in self._mute:
                        source, giver = copy, image
                except ACTOR_FAILED as error:
                    image.error = error

    async def _give(self, image: NodeImage, bucket: WeightBucket, message: Any, passes_on: bool) -> Any:
        """Let a generator write a bucket; returns a copy of the bucket on its node."""
        generator, who = image.generator, image.holder
        if image.path is None:
            of = image.number, self._weights.version.pack(), sum(self._weights.sizes)
            image.path = await call(generator.hold_image, *of, who=who, within=self._within)
        copy, written = generator.write_image.remote(image.number, bucket, message, passes_on)
        await answer(written, who=who, within=self._within)
        return copy


def bounds_of_buckets(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (rank, start, stop) of each bucket, in bytes of the rank's part; `sizes`: the bytes of each rank's part.
    The ranks take turns, so that all network links are busy.

    >>> [(rank, start >> 20, stop >> 20) for rank, start, stop in bounds_of_buckets([3 << 20, 1 << 20])]
    [(0, 0, 1), (1, 0, 1), (0, 1, 2), (0, 2, 3)]
    """
    size = min(max(sum(sizes) // BUCKETS, MIN_BYTES), MAX_BYTES)
    by_rank = (
        [(rank, start, min(start + size, n_bytes)) for start in range(0, n_bytes, size)]
        for rank, n_bytes in enumerate(sizes)
    )
    return [each for each in chain.from_iterable(zip_longest(*by_rank)) if each is not None]
