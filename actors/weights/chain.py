"""One publication on its way from rank 0 to several nodes: each receives it once and passes it on to the next.

    rank 0 --bucket 2--> node A --bucket 1--> node B --bucket 0--> node C

The link of rank 0 carries one copy of the weights, whatever the number of nodes, and the last node has them a few
buckets after the first. A bucket is passed on as an object of the node that has just received it, because Ray would
fetch one object from whichever node holds it, rank 0's among them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import ray.exceptions

from actors.calls import answer, call, first_error
from actors.trainer.group import TrainerGroup, TrainerLost
from actors.weights.bucket import Bucket
from actors.weights.publication import ALIGNED
from service.errors import BatonError, Starved
from service.types import PolicyVersion

TRIES = 3
"""Silent calls, one after the other, that fit into `weights.sync_deadline`."""
BUCKETS = 64
"""Buckets of a publication, within the next two bounds."""
LEAST_BYTES, MOST_BYTES = 1 << 20, 64 << 20
"""Of a bucket."""
AT_ONCE = 2
"""Buckets on their way to a node: one that arrives, one that is asked for."""

NODE_FAILED = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, BatonError)
"""Errors of a call to a generator that is lost for this publication; any other error is a bug."""
NOT_PASSED_ON = (ray.exceptions.ObjectLostError, Starved)
"""Errors of a call whose argument may be what failed to come."""


class Replaced(BatonError):
    """Rank 0 has newer weights, which are about to be published."""


class Sent(NamedTuple):
    """What left rank 0."""

    n_bytes: int
    changed: float | None
    """Fraction of the elements that differ from the version before; None: rank 0 had none to compare with."""


class Chain:
    """The way of one publication over some generators, each on a node of its own."""

    def __init__(
        self,
        generators: Mapping[str, Any],
        trainer: TrainerGroup,
        images: Mapping[str, int],
        paths: dict[str, str],
        deadline: float,
    ) -> None:
        """`images`: the number of the image that each generator writes, in the order of the chain; `paths`: where
        those lie that are there already."""
        self._generators = {name: generators[name] for name in images}  # also after one of them has left
        self._trainer, self._images, self.paths = trainer, images, paths
        self._n_bytes = 0
        self._within = deadline / TRIES
        self._hops = {name: asyncio.Semaphore(AT_ONCE) for name in images}
        self._mute = set[str]()
        """Generators whose copies did not reach the next node."""
        self._sent: list[Bucket] = []
        self.lost: dict[str, BaseException] = {}
        """Why a generator does not have the weights."""

    async def send(self, version: PolicyVersion, n_bytes: int) -> Sent:
        """Send the file of these weights, of so many bytes.

        Raises:
            Replaced: rank 0 has newer ones.
            TrainerLost: rank 0 does not answer.
        """
        self._n_bytes = n_bytes
        size = min(max(n_bytes // BUCKETS, LEAST_BYTES), MOST_BYTES) // ALIGNED * ALIGNED
        under_way = asyncio.Semaphore(AT_ONCE * (len(self._images) + 1))
        try:
            async with asyncio.TaskGroup() as trips:
                for start in range(0, n_bytes, size):
                    await under_way.acquire()
                    trip = trips.create_task(self._trip(version, start, min(start + size, n_bytes)))
                    trip.add_done_callback(lambda done: under_way.release())
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        compared = [bucket for bucket in self._sent if bucket.changed is not None]
        elements = sum(bucket.n_bytes // bucket.itemsize for bucket in compared)
        changed = sum(bucket.changed or 0 for bucket in compared) / elements if elements else None
        return Sent(sum(bucket.message_bytes for bucket in self._sent), changed)

    async def _trip(self, version: PolicyVersion, start: int, stop: int) -> None:
        """Take one bucket to every generator that is not lost."""
        bucket, from_rank_0 = await self._bucket(version, start, stop)
        source, giver = from_rank_0, ""
        for name in self._images:
            async with self._hops[name]:
                if name in self.lost:
                    continue
                try:
                    try:
                        written, copy = await self._give(name, bucket, source)
                    except NOT_PASSED_ON:
                        if not giver:
                            raise
                        self._mute.add(giver)
                        written, copy = await self._give(name, bucket, from_rank_0)
                    if not written:
                        await self._give(name, *await self._bucket(version, start, stop, whole=True))
                    elif name not in self._mute:
                        source, giver = copy, name
                except (Replaced, TrainerLost):
                    raise
                except NODE_FAILED as error:
                    self.lost[name] = error

    async def _bucket(self, version: PolicyVersion, start: int, stop: int, whole: bool = False) -> tuple[Bucket, Any]:
        found = await self._trainer.bucket(version, start, stop, whole)
        if found is None:
            raise Replaced(f"newer weights than those of version {version} are about to be published")
        self._sent.append(found[0])
        return found

    async def _give(self, name: str, bucket: Bucket, message: Any) -> tuple[bool, Any]:
        """Let a generator write a bucket; returns whether it has what the bucket changes, and a copy on its node."""
        generator, number = self._generators[name], self._images[name]
        if name not in self.paths:
            self.paths[name] = await call(generator.hold_image, number, self._n_bytes, who=name, within=self._within)
        passes_on = name != [*self._images][-1]
        copy, written = generator.write_image.remote(number, bucket, message, passes_on)
        return await answer(written, who=name, within=self._within), copy
