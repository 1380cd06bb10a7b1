"""A node's image of the newest weights: a safetensors file in shared memory, which every engine of the node loads from.

A generator holds images for the engines of its node (`ImageHolder`); the driver chooses which generator, see
`actors.weights.node_images`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from threading import Lock
from typing import Any

import ray

from actors.weights.delta import WeightBucket, decode
from actors.weights.part import WeightPart
from actors.weights.policy_tensors import PolicySize, WeightBytes
from service.errors import WeightsGone


class Image:
    """A file that is written bucket by bucket, in any order; an update may change it in place while no engine
    loads from it.

    The file has no name. It vanishes when the last descriptor is closed, at the latest when the processes that
    hold one end.
    """

    def __init__(self, parts: Sequence[WeightPart]) -> None:
        """Create the file; `parts`: where the bytes of each rank lie in it."""
        self._parts = parts
        self._fd = os.memfd_create("baton-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, sum(part.n_bytes for part in parts))
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}#{os.fstat(self._fd).st_ino}"
        """Where an engine of this node opens the file, and the file's own number, because descriptors are reused."""
        self._version = 0
        self._checksums: dict[tuple[int, int], int] = {}
        """Checksums of the written buckets, by their rank and first byte."""
        self._writing = Lock()

    def write(self, bucket: WeightBucket, message: WeightBytes) -> bool:
        """Write a bucket; returns False if the message is for other base bytes than those in the image.

        Raises:
            WeightsGone: the bucket is late, because the image has newer weights or was released.
            ValueError: the result differs from the sent bytes; the image stays unchanged.
        """
        with self._writing:
            if self._fd < 0 or bucket.version < self._version:
                raise WeightsGone("a bucket of weights came after newer ones")
            self._version = bucket.version
            spans = self._parts[bucket.rank].within(bucket.start, bucket.start + bucket.n_bytes)
            place, base = (bucket.rank, bucket.start), bytearray()
            if bucket.base is not None:
                if bucket.base != self._checksums.get(place):
                    return False
                base += b"".join(os.pread(self._fd, n_bytes, at) for at, n_bytes in spans)
            octets = decode(bucket, message, base)
            self._checksums.pop(place, None)
            for at, n_bytes in spans:
                left, octets = octets[:n_bytes], octets[n_bytes:]
                while left:
                    written = os.pwrite(self._fd, left, at)
                    left, at = left[written:], at + written
            self._checksums[place] = bucket.checksum
        return True

    def close(self) -> None:
        """Free the memory as soon as no engine loads from it."""
        with self._writing:
            fd, self._fd = self._fd, -1
            os.close(fd)


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


def open_image(path: str, size: PolicySize) -> int:
    """Open an image by its path; the new descriptor outlives the process that wrote the image.

    Raises:
        WeightsGone: that process has ended or is about to end, or the path is another image.
        ValueError: the image is not the whole policy.
    """
    at, _, number = path.partition("#")
    try:
        fd = os.open(at, os.O_RDONLY)
    except OSError as error:  # which error is raised depends on how far the process has ended
        raise WeightsGone(f"the weights at {path} are gone ({error.strerror})") from error
    try:
        file = os.fstat(fd)
        if str(file.st_ino) != number:
            raise WeightsGone(f"the weights at {path} are gone (others are there)")
        n_bytes = file.st_size
        try:
            shapes = _shapes(fd, n_bytes)
            size.count(shapes)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"weights of {n_bytes} bytes are not a safetensors file") from error
        size.check(shapes)
    except BaseException:  # the caller does not get the descriptor, which would otherwise keep all weights in memory
        os.close(fd)
        raise
    return fd


def _shapes(fd: int, n_bytes: int) -> list[tuple[str, list[int]]]:
    """Return names and shapes in the file's header; `ValueError` if the data do not end where the header says."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > n_bytes:
        raise ValueError("the header was cut off")
    header: dict[str, Any] = json.loads(os.pread(fd, length, 8))
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    if 8 + length + max((end for tensor in tensors.values() for end in tensor["data_offsets"]), default=0) != n_bytes:
        raise ValueError("data were cut off")
    return [(name, tensor["shape"]) for name, tensor in tensors.items()]
