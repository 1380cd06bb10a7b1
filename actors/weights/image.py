"""A node's image of some weights: a safetensors file in shared memory, which every engine of the node loads from.

A generator holds images for the engines of its node (`ImageHolder`); the driver chooses the generator (see
`actors.weights.node_images`). The next version's image reuses the memory of a released image, so that engines and NIXL
register that memory once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from threading import Lock

from actors.weights.memory import NO_VERSION, WeightMemory
from actors.weights.nixl_reads import NixlAgent, ReadFailed, RemoteMemory
from actors.weights.part import Source, WeightBucket
from actors.weights.policy_tensors import WeightBytes, verify
from service.errors import WeightsGone

SPARE = 2
"""Maximum number of spare memory regions: while engines change from one version to the next, a node has two images."""
RELEASED = 1000
"""Number of released images whose numbers are remembered."""


class Image:
    """The weights file of one version in shared memory, which is written bucket by bucket, in any order, or read as a
    whole from the ranks."""

    def __init__(self, version: int, n_bytes: int, memory: WeightMemory | None = None) -> None:
        """Begin an empty file of `n_bytes` in `memory`, whose size is `n_bytes` too; if `memory` is None, in new
        memory. The memory gets the version only once all bytes of the file are there."""
        self._version, self._missing = version, n_bytes
        self.memory = memory or WeightMemory(n_bytes)
        self.memory.mark(NO_VERSION)
        self._octets = self.memory.octets().numpy()
        self.path = self.memory.path
        self._written: set[tuple[tuple[int, int], ...]] = set()
        """The spans of the buckets that were written."""
        self._writing = Lock()
        self._is_released = False

    def write(self, bucket: WeightBucket, message: WeightBytes) -> None:
        """Write a bucket, unless it was written before.

        Raises:
            ValueError: the bytes that arrived differ from the bytes that were sent; the image stays unchanged.
            WeightsGone: the image was released.
        """
        octets = verify(message, bucket.checksum)
        with self._writing:
            if self._is_released:
                raise WeightsGone("these weights are not held any more")
            if bucket.spans in self._written:
                return
            for at, n_bytes in bucket.spans:
                self._octets[at : at + n_bytes] = octets[:n_bytes]
                octets = octets[n_bytes:]
                self._missing -= n_bytes
            self._written.add(bucket.spans)
            if not self._missing:
                self.memory.mark(self._version)

    def read(self, agent: NixlAgent, sources: Sequence[Source], remotes: Sequence[RemoteMemory], within: float) -> None:
        """Read all parts from other processes with NIXL. Raises `ReadFailed` if a read fails, or takes more than
        `within` seconds."""
        agent.read(self._version, sources, remotes, self.memory, within)
        self.memory.mark(self._version)

    def release(self) -> WeightMemory:
        """Wait for a write in progress, refuse later writes, and return the memory, which another image may use.

        A write may come later than the release, because the driver may have given up waiting for the write.
        """
        with self._writing:
            self._is_released = True
        return self.memory

    def close(self) -> None:
        """Free the memory as soon as no engine has it open."""
        self.memory.close()


class ImageHolder:
    """Base class of generators: holds images of the weights for the engines of a node. The driver gives each image a
    number."""

    def __init__(self) -> None:
        self._images: dict[int, Image] = {}
        self._released = deque[int](maxlen=RELEASED)
        """Numbers of released images: Ray may reorder calls, and a read may end late."""
        self._spare: list[WeightMemory] = []
        """The memory of images that were released, at most `SPARE`."""
        self._agent: NixlAgent | None = None
        self._reading = asyncio.Lock()

    async def hold_image(self, number: int, version: int, n_bytes: int) -> str:
        """Create image `number`, of `n_bytes`, for all engines of this node, if there is no such image yet; hold it
        until `release_image`. Returns the image's path.

        Raises:
            WeightsGone: the image was already released; Ray may reorder the calls.
        """
        if number in self._released:
            raise WeightsGone("these weights are not held any more")
        if number not in self._images:
            self._images[number] = Image(version, n_bytes, self._spare_of(n_bytes))
        return self._images[number].path

    async def read_image(
        self, number: int, version: int, sources: Sequence[Source], remotes: Sequence[RemoteMemory], within: float
    ) -> tuple[str | None, str]:
        """Hold an image as `hold_image` does, and fill it from other hosts within `within` seconds.

        Returns the image's path and an empty text; if the read fails, None and the reason, and no image is held.
        """
        try:
            return await self._read_image(number, version, sources, remotes, within)
        finally:
            self._free_spare()

    async def _read_image(
        self, number: int, version: int, sources: Sequence[Source], remotes: Sequence[RemoteMemory], within: float
    ) -> tuple[str | None, str]:
        async with self._reading:
            n_bytes = sum(source.part.n_bytes for source in sources)
            image = Image(version, n_bytes, self._spare_of(n_bytes))
            try:
                self._agent = self._agent or NixlAgent()
                await asyncio.to_thread(image.read, self._agent, sources, remotes, within)
            except ReadFailed as failed:
                # A read that is still in progress ends with the agent, and its memory is not used again.
                self._agent = None
                image.close()
                return None, str(failed)
            if number in self._released or number in self._images:  # the driver did not wait for it
                self._keep(image.memory)
                return None, "the image was read too late"
            self._images[number] = image
            return image.path, ""

    def _spare_of(self, n_bytes: int) -> WeightMemory | None:
        """Return spare memory of this size; memory of another size is freed."""
        if self._spare and self._spare[-1].n_bytes != n_bytes:
            self._agent = None
            while self._spare:
                self._spare.pop().close()
        return self._spare.pop() if self._spare else None

    async def write_image(self, number: int, bucket: WeightBucket, message: WeightBytes) -> None:
        """Write a bucket into an image.

        Raises:
            WeightsGone: there is no such image any more.
            ValueError: the bytes that arrived differ from the bytes that were sent.
        """
        if (image := self._images.get(number)) is None:
            raise WeightsGone("these weights are not held any more")
        await asyncio.to_thread(image.write, bucket, message)

    async def release_image(self, number: int) -> None:
        """Hold an image no longer, and keep its memory for a later image. If an earlier process of this generator held
        the image, there is nothing to do, because the memory was freed with that process."""
        self._released.append(number)
        if (image := self._images.pop(number, None)) is not None:
            self._keep(await asyncio.to_thread(image.release))

    def _keep(self, memory: WeightMemory) -> None:
        self._spare.append(memory)
        self._free_spare()

    def _free_spare(self) -> None:
        """Free all but `SPARE` spare memories, unless a read is in progress, whose agent has registered them."""
        while len(self._spare) > SPARE and not self._reading.locked():
            self._agent = None  # it has registered the memory
            self._spare.pop(0).close()
