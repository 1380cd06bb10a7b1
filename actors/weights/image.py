"""A node's image of some weights: a safetensors file in shared memory, which every engine of the node loads from.

A generator holds images for the engines of its node (`ImageHolder`); the driver chooses which generator, see
`actors.weights.node_images`.
"""

from __future__ import annotations

import asyncio
from threading import Lock

import ray

from actors.weights.memory import WeightMemory
from actors.weights.part import WeightBucket
from actors.weights.policy_tensors import WeightBytes, verify
from service.errors import WeightsGone


class Image:
    """The weights file of one version in shared memory, which is written bucket by bucket, in any order."""

    def __init__(self, version: int, n_bytes: int) -> None:
        """Create the file; it is marked with its version once all of its bytes are written."""
        self._version, self._missing = version, n_bytes
        self._memory = WeightMemory(n_bytes)
        self._octets = self._memory.octets().numpy()
        self.path = self._memory.path
        self._written: set[tuple[tuple[int, int], ...]] = set()
        """The spans of the buckets that were written."""
        self._writing = Lock()

    def write(self, bucket: WeightBucket, message: WeightBytes) -> None:
        """Write a bucket, unless it was written before.

        Raises:
            ValueError: the message differs from the sent message; the image stays unchanged.
        """
        octets = verify(message, bucket.checksum)
        with self._writing:
            if bucket.spans in self._written:
                return
            for at, n_bytes in bucket.spans:
                self._octets[at : at + n_bytes] = octets[:n_bytes]
                octets = octets[n_bytes:]
                self._missing -= n_bytes
            self._written.add(bucket.spans)
            if not self._missing:
                self._memory.mark(self._version)

    def close(self) -> None:
        """Free the memory as soon as no engine has it open."""
        self._memory.close()


class ImageHolder:
    """The part of a generator that holds images, under numbers that the driver assigns."""

    def __init__(self) -> None:
        self._images: dict[int, Image] = {}
        self._released: set[int] = set()
        """Numbers of images whose release was requested before they were held."""

    async def hold_image(self, number: int, version: int, n_bytes: int) -> str:
        """Hold an image of weights for all engines of this node until `release_image`; returns its path.

        Raises:
            WeightsGone: the image was already released, because Ray may reorder calls.
        """
        if number in self._released:
            raise WeightsGone("these weights are not held any more")
        if number not in self._images:
            self._images[number] = Image(version, n_bytes)
        return self._images[number].path

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    async def write_image(
        self, number: int, bucket: WeightBucket, message: WeightBytes, passes_on: bool
    ) -> tuple[WeightBytes | None, None]:
        """Write a bucket into an image; returns the message to pass on, and separately None as an acknowledgement.

        Raises:
            WeightsGone: there is no such image any more.
            ValueError: the bytes differ from the sent bytes.
        """
        if (image := self._images.get(number)) is None:
            raise WeightsGone("these weights are not held any more")
        await asyncio.to_thread(image.write, bucket, message)
        return message if passes_on else None, None

    async def release_image(self, number: int) -> None:
        """Free an image; an image of an earlier process is ignored, because its memory is already free."""
        if (image := self._images.pop(number, None)) is None:
            self._released.add(number)
        else:
            image.close()
