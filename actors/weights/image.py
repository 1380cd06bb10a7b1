"""A node's image of the newest weights: a safetensors file in shared memory, which every engine of the node loads from.

A generator holds images for the engines of its node (`ImageHolder`); the driver chooses which generator, see
`actors.weights.node_images`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from threading import Lock

import ray

from actors.weights.delta import WeightBucket, decode
from actors.weights.memory import NO_VERSION, WeightMemory
from actors.weights.part import WeightPart
from actors.weights.policy_tensors import WeightBytes
from service.errors import WeightsGone


class Image:
    """A whole file in shared memory that is written bucket by bucket, in any order; an update may change it in
    place."""

    def __init__(self, parts: Sequence[WeightPart]) -> None:
        """Create the file; `parts`: where the bytes of each rank lie in it."""
        self._parts = parts
        self._n_bytes = sum(part.n_bytes for part in parts)
        self._memory = WeightMemory(self._n_bytes)
        self._octets = self._memory.octets().numpy()
        self.path = self._memory.place().path
        self._is_closed = False
        self._version = NO_VERSION
        self._missing = 0
        """Bytes of the version that have not been written."""
        self._checksums: dict[tuple[int, int], int] = {}
        """Checksums of the written buckets, by their rank and first byte."""
        self._written: set[tuple[int, int]] = set()
        """The buckets of the version that were written."""
        self._writing = Lock()

    def write(self, bucket: WeightBucket, message: WeightBytes) -> bool:
        """Write a bucket; returns False if the message is for other base bytes than those in the image.

        Raises:
            WeightsGone: the bucket is late, because the image has newer weights or was released.
            ValueError: the result differs from the sent bytes; the image stays unchanged.
        """
        with self._writing:
            if self._is_closed or bucket.version < self._version:
                raise WeightsGone("a bucket of weights came after newer ones")
            if bucket.version > self._version:
                self._memory.mark(NO_VERSION)
                self._version, self._missing, self._written = bucket.version, self._n_bytes, set()
            spans = self._parts[bucket.rank].within(bucket.start, bucket.start + bucket.n_bytes)
            place, base = (bucket.rank, bucket.start), bytearray()
            if bucket.base is not None:
                if bucket.base != self._checksums.get(place):
                    return False
                base += b"".join(self._octets[at : at + n_bytes].tobytes() for at, n_bytes in spans)
            octets = decode(bucket, message, base)
            for at, n_bytes in spans:
                self._octets[at : at + n_bytes] = octets[:n_bytes]
                octets = octets[n_bytes:]
            self._checksums[place] = bucket.checksum
            if place not in self._written:
                self._written.add(place)
                self._missing -= bucket.n_bytes
            if not self._missing:
                self._memory.mark(bucket.version)
        return True

    def close(self) -> None:
        """Free the memory as soon as no engine has it open."""
        with self._writing:
            self._is_closed = True
            self._memory.close()


class ImageHolder:
    """The part of a generator that holds images, under numbers that the driver assigns."""

    def __init__(self) -> None:
        self._images: dict[int, Image] = {}
        self._released: set[int] = set()
        """Numbers of images whose release was requested before they were held."""

    async def hold_image(self, number: int, parts: Sequence[WeightPart]) -> str:
        """Hold an image of weights for all engines of this node until `release_image`; returns its path.

        Raises:
            WeightsGone: it was already released; Ray may begin a call with large arguments after later calls.
        """
        if number in self._released:
            raise WeightsGone("these weights are not held any more")
        if number not in self._images:
            self._images[number] = Image(parts)
        return self._images[number].path

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    async def write_image(
        self, number: int, bucket: WeightBucket, message: WeightBytes, passes_on: bool
    ) -> tuple[WeightBytes | None, bool]:
        """Write a bucket into an image; returns the message to pass on, and whether the image had the message's base.

        Raises:
            WeightsGone: there is no such image any more, or it has newer weights.
            ValueError: the bytes differ from the sent ones.
        """
        if (image := self._images.get(number)) is None:
            raise WeightsGone("these weights are not held any more")
        written = await asyncio.to_thread(image.write, bucket, message)
        return message if passes_on else None, written

    async def release_image(self, number: int) -> None:
        """Free an image; an image of an earlier process is ignored, because its memory is already free."""
        if (image := self._images.pop(number, None)) is None:
            self._released.add(number)
        else:
            await asyncio.to_thread(image.close)
