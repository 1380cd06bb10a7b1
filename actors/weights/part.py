"""A rank's part of a weights file: the bytes that the rank holds, one after another, and where each lies in the file.

    file     | header | a: rows 0 1 | a: rows 2 3 | b: row 0 | b: row 1 |
    rank 0   | header | a: rows 0 1 |             | b: row 0 |                part: header, rows 0 1 of a, row 0 of b
    rank 1                          | a: rows 2 3 |          | b: row 1 |     part: rows 2 3 of a, row 1 of b

A weights file is a safetensors file, `header length (8 bytes) | header (JSON) | data`. No rank ever has the whole
file: each rank copies only its own rows, and a bucket is copied from those when it is requested.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import numpy as np
import torch

from actors.weights.delta import Octets, WeightBucket, bucket_of, encode
from service.learn.model.sharding import Rows

TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
"""Names of the types of weights in a header."""
ALIGNED = 8
"""Bytes of which the start of the data is a multiple."""


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
        """Return the bytes of the part up to the end of each span."""
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


def check_parts(parts: Sequence[WeightPart]) -> None:
    """Check that these parts contain each byte of one file exactly once.

    Raises:
        ValueError: some bytes are missing or occur twice.
    """
    expected = 0
    for start, n_bytes in sorted(span for part in parts for span in part.spans):
        if start != expected:
            raise ValueError("the parts of the ranks are not each byte of the weights once")
        expected += n_bytes


class PartCopy:
    """A rank's part of the weights of one version, copied when the version is published."""

    def __init__(self, version: int, weights: Mapping[str, Rows], rank: int = 0, base: PartCopy | None = None) -> None:
        """Copy the part; `base`: the copy of the previous version, if only changes to it are to be sent; its own
        base is then freed."""
        self.version, self._rank = version, rank
        pieces = list(_pieces(weights, rank))
        self._pieces = [octets for _, octets in pieces]
        self._ends = np.cumsum([0, *map(len, self._pieces)])
        self.part = WeightPart.of_spans([(at, len(octets)) for at, octets in pieces])
        self._itemsize = min((rows.itemsize for _, _, rows in weights.values()), default=1)
        self._checksums: dict[int, int] = {}
        """Checksums of the buckets that were sent, by their first byte."""
        self._base = base if base is not None and base.part.n_bytes == self.part.n_bytes else None
        if base is not None:
            base.forget_base()

    def forget_base(self) -> None:
        """Free the memory of the previous version; buckets are sent whole from now on."""
        self._base = None

    def bucket(self, start: int, stop: int, whole: bool) -> tuple[WeightBucket, Octets]:
        """Return these bytes of the part as a message; it has only the changes, unless `whole` is set or the
        changes are large."""
        new = self._read(start, stop)
        bucket = bucket_of(self.version, self._rank, start, new)
        self._checksums[start] = bucket.checksum
        before = self._base  # another thread may remove it meanwhile, when there are newer weights
        checksum = None if before is None else before._checksums.get(start)
        if before is None or checksum is None:
            return bucket, new
        bucket = bucket._replace(base=checksum, itemsize=self._itemsize)
        return encode(bucket, before._read(start, stop), new, whole)

    def _read(self, start: int, stop: int) -> Octets:
        """Return a copy of these bytes."""
        first, last = np.searchsorted(self._ends[1:], [start, stop - 1], side="right")
        pieces = (self._pieces[n][max(start - self._ends[n], 0) : stop - self._ends[n]] for n in range(first, last + 1))
        return np.concatenate([*pieces])


def _pieces(weights: Mapping[str, Rows], rank: int) -> Iterator[tuple[int, Octets]]:
    """Return a rank's tensors, each with its first byte in the file, in the order of the file; rank 0 has the
    header."""
    header = _header(weights)
    if rank == 0:
        yield 0, np.frombuffer(header, np.uint8)
    at = len(header)
    for shape, first, rows in weights.values():
        if rows.numel():
            yield at + first * prod(shape[1:]) * rows.itemsize, rows.contiguous().view(-1).view(torch.uint8).numpy()
        at += prod(shape) * rows.itemsize


def _header(weights: Mapping[str, Rows]) -> bytes:
    tensors, end = dict[str, object](), 0
    for name, (shape, _, rows) in weights.items():
        start, end = end, end + prod(shape) * rows.itemsize
        tensors[name] = {"dtype": TYPES[rows.dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(8, "little") + text
