"""A node's image of the newest weights: a safetensors file in shared memory, which every engine of the node loads from.

One generator of a node holds the image for the others; the driver chooses it (see `actors.weights.node_images`). A new
version overwrites the one before, so that engines and NIXL register the memory once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from threading import Lock

from actors.weights.memory import NO_VERSION, WeightMemory
from actors.weights.nixl_reads import NixlAgent, ReadFailed, RemoteMemory
from actors.weights.part import Source, WeightBucket
from actors.weights.policy_tensors import WeightBytes, verify
from service.errors import WeightsGone


class ImageHolder:
    """Base class of generators: holds the image of a node. The image is written in buckets, in any order, or read as a
    whole from the ranks. Its memory gets the version only once all bytes are there."""

    def __init__(self) -> None:
        self._memory = WeightMemory(0)
        self._version = NO_VERSION
        """The version that the image has, or gets."""
        self._written: set[tuple[tuple[int, int], ...]] = set()
        """The spans of the buckets that were written."""
        self._lock = Lock()
        """Guards the attributes above."""
        self._agent: NixlAgent | None = None
        self._reading = asyncio.Lock()
        self._read_into: WeightMemory | None = None
        """The memory into which a read is in progress."""

    async def hold_image(self, version: int, n_bytes: int) -> str:
        """Begin the image of a version, of `n_bytes`, unless it was begun before. Returns the image's path.

        Raises:
            WeightsGone: a newer version was begun; Ray may reorder calls.
        """
        if self._read_into is self._memory:  # the driver did not wait for the read
            self._drop_memory()
        return self._begun(version, n_bytes).path

    async def write_image(self, version: int, bucket: WeightBucket, message: WeightBytes) -> None:
        """Write a bucket into the image, unless it was written before.

        Raises:
            WeightsGone: the image has another version.
            ValueError: the bytes that arrived differ from the bytes that were sent; the image stays unchanged.
        """
        await asyncio.to_thread(self._write, version, bucket, message)

    async def read_image(
        self, version: int, sources: Sequence[Source], remotes: Sequence[RemoteMemory], within: float
    ) -> tuple[str | None, str]:
        """Read the image of a version from the ranks with NIXL, in at most `within` seconds.

        Returns the image's path and an empty text; if the read fails, None and the reason.
        """
        async with self._reading:
            try:
                memory = self._read_into = self._begun(version, sum(source.part.n_bytes for source in sources))
                self._agent = self._agent or NixlAgent()
                await asyncio.to_thread(self._agent.read, version, sources, remotes, memory, within)
            except WeightsGone as gone:
                return None, str(gone)
            except ReadFailed as failed:
                if memory is self._memory:
                    self._drop_memory()
                return None, str(failed)
            finally:
                self._read_into = None
            if memory is not self._memory:
                return None, "the image was read too late"
            memory.mark(version)
            return memory.path, ""

    def _begun(self, version: int, n_bytes: int) -> WeightMemory:
        with self._lock:
            if version < self._version:
                raise WeightsGone("a newer version of the weights is held")
            if n_bytes != self._memory.n_bytes:
                self._drop_memory()
                self._memory = WeightMemory(n_bytes)
            elif version == self._version:
                return self._memory
            self._version, self._written = version, set()
            self._memory.mark(NO_VERSION)
            return self._memory

    def _drop_memory(self) -> None:
        """Stop using the memory: a read into it may still be in progress, and ends only when its agent ends."""
        self._agent = None
        self._memory.close()
        self._memory = WeightMemory(0)

    def _write(self, version: int, bucket: WeightBucket, message: WeightBytes) -> None:
        octets = verify(message, bucket.checksum)
        with self._lock:
            if version != self._version:  # the driver did not wait for this write
                raise WeightsGone("these weights are not held any more")
            if bucket.spans in self._written:
                return
            image = self._memory.octets().numpy()
            for at, n_bytes in bucket.spans:
                image[at : at + n_bytes] = octets[:n_bytes]
                octets = octets[n_bytes:]
            self._written.add(bucket.spans)
            if sum(n_bytes for spans in self._written for _, n_bytes in spans) == self._memory.n_bytes:
                self._memory.mark(version)
