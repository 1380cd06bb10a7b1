"""A rank's part of a weights file: the bytes that the rank holds, one after another, and their places in the file.

    file     | header | a: rows 0 1 | a: rows 2 3 | b: row 0 | b: row 1 |
    rank 0   | header | a: rows 0 1 |             | b: row 0 |                part: header, rows 0 1 of a, row 0 of b
    rank 1                          | a: rows 2 3 |          | b: row 1 |     part: rows 2 3 of a, row 1 of b

A weights file is a safetensors file, `header length (8 bytes) | header (JSON) | data`. No rank ever has the whole
file: each rank copies only its own rows, into shared memory that engines of its host read, and from which buckets are
copied for other hosts.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.weights.memory import NO_VERSION, PAGE, WeightMemory
from actors.weights.policy_tensors import Octets, checksum_of
from service.learn.model.sharding import Rows, finish_host_copies

TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
"""Names of the weights' dtypes, as written in the header of a weights file."""
ALIGNED = 8
"""Alignment of the start of the data, in bytes."""


@dataclass(frozen=True)
class WeightPart:
    """The places of a part's bytes: spans of a file, in the order of the file."""

    spans: tuple[tuple[int, int], ...]
    """The first byte in the file and the number of bytes of each span."""

    @staticmethod
    def of_spans(spans: Sequence[tuple[int, int]]) -> WeightPart:
        """Make a part of these spans; adjacent spans become one.

        >>> WeightPart.of_spans([(0, 8), (8, 4), (20, 4)]).spans
        ((0, 12), (20, 4))
        """
        joined = list[tuple[int, int]]()
        for start, n_bytes in spans:
            if joined and sum(joined[-1]) == start:
                start, n_bytes = joined[-1][0], joined.pop()[1] + n_bytes
            joined.append((start, n_bytes))
        return WeightPart((*joined,))

    @cached_property
    def ends(self) -> list[int]:
        """Return the number of bytes of the part up to the end of each span."""
        return [*accumulate(n_bytes for _, n_bytes in self.spans)]

    @property
    def n_bytes(self) -> int:
        """Return the number of bytes of the part."""
        return self.ends[-1] if self.ends else 0

    def within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return where the bytes from `start` to `stop` of the part lie in the file, as spans.

        >>> WeightPart.of_spans([(0, 8), (20, 4)]).within(6, 10)
        [(6, 2), (20, 2)]
        """
        found = list[tuple[int, int]]()
        for n in range(bisect_right(self.ends, start), bisect_left(self.ends, stop) + 1):
            at, n_bytes = self.spans[n]
            begin = self.ends[n] - n_bytes
            first, last = max(start, begin), min(stop, self.ends[n])
            found.append((at + first - begin, last - first))
        return found


class Source(NamedTuple):
    """The place from which processes of the same host read a part."""

    part: WeightPart
    path: str
    """Path of the memory, see `WeightMemory`."""
    start: int = PAGE
    """First byte of the buffer in the memory."""
    buffer: int = 0
    """Number of the buffer in the memory."""
    stays: bool = False
    """Whether later versions will lie in the same memory."""


class WeightBucket(NamedTuple):
    """Describes bytes of a part that travel as one message."""

    spans: tuple[tuple[int, int], ...]
    """The first byte in the file and the number of bytes of each span of the message."""
    checksum: int


def check_parts(parts: Sequence[WeightPart]) -> None:
    """Check that these parts contain each byte of one file exactly once.

    Raises:
        ValueError: some bytes are missing or occur twice.
    """
    whole = WeightPart.of_spans(sorted(span for part in parts for span in part.spans))
    if [start for start, _ in whole.spans] != [0]:
        raise ValueError("the parts of the ranks are not each byte of the weights once")


class PartBuffers:
    """A rank's part of the newest weights, in one of two buffers. The other buffer has the previous version until the
    next version is published."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self.version: int | None = None
        self.part = WeightPart(())
        self._memory = WeightMemory(0, 2)
        self._newest = 0
        """Number of the buffer of the newest version."""
        self._lock = Lock()

    @property
    def source(self) -> Source:
        """Return where the newest version lies."""
        return Source(self.part, self._memory.path, self._memory.start(self._newest), self._newest, stays=True)

    def copy(self, version: int, weights: Mapping[str, Rows], dtype: torch.dtype) -> None:
        """Copy the part of a version, converted to `dtype`, into the buffer with the older version."""
        pieces = list(_pieces(weights, self._rank, dtype))
        part = WeightPart.of_spans([(at, source.numel() * kind.itemsize) for at, source, kind in pieces])
        with self._lock:
            if part != self.part:
                self._memory.close()
                self._memory, self.part = WeightMemory(part.n_bytes, 2), part
                self._memory.register()
            self.version, self._newest = version, 1 - self._newest
            self._memory.mark(NO_VERSION, self._newest)
            left = self._memory.octets(self._newest)
            for _, source, kind in pieces:
                octets, left = left.tensor_split([source.numel() * kind.itemsize])
                octets.view(kind).view(source.shape).copy_(source, non_blocking=True)
            finish_host_copies()
            self._memory.mark(version, self._newest)

    def bucket(self, version: int, start: int, stop: int) -> tuple[WeightBucket, Octets] | None:
        """Return these bytes of the part as a message; None: the buffers have another version."""
        with self._lock:
            if version != self.version:
                return None
            octets = self._memory.octets(self._newest)[start:stop].numpy()
            message: Octets = octets.copy()  # the buffer may change before the message is sent
            return WeightBucket((*self.part.within(start, stop),), checksum_of(message)), message


def _pieces(weights: Mapping[str, Rows], rank: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, torch.dtype]]:
    """Yield a rank's tensors in the order of the file, each with its byte offset and dtype there; rank 0 also yields
    the header, first."""
    header = _header(weights, dtype)
    if rank == 0:
        yield 0, torch.from_numpy(np.frombuffer(bytearray(header), np.uint8)), torch.uint8
    at = len(header)
    for shape, first, rows in weights.values():
        if rows.numel():
            yield at + first * prod(shape[1:]) * dtype.itemsize, rows, dtype
        at += prod(shape) * dtype.itemsize


def _header(weights: Mapping[str, Rows], dtype: torch.dtype) -> bytes:
    tensors, end = dict[str, object](), 0
    for name, (shape, _, _) in weights.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        tensors[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(8, "little") + text
