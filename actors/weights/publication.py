"""A rank's end of weights that go by memory: copies of what the rank holds, given out in buckets of a safetensors file.

A safetensors file is `header length (8 bytes) | header (JSON) | data`. It is never made as a whole: each rank copies
its own rows only (`actors.weights.part`), and a bucket is copied from those when it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from actors.weights.bucket import Bucket, Octets, bucket_of, encode
from actors.weights.part import Part
from service.learn.model.sharding import Rows

TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
"""What a header calls the types of weights."""
ALIGNED = 8
"""The data begin at a multiple of so many bytes."""


class Publication:
    """What a rank holds of the weights of one version."""

    def __init__(
        self, version: int, weights: Mapping[str, Rows], rank: int = 0, base: Publication | None = None
    ) -> None:
        """`base`: the version before, of which only what has changed since is to travel; it needs none itself then."""
        self.version, self._rank = version, rank
        pieces = list(_pieces(weights, rank))
        self._pieces = [octets for _, octets in pieces]
        self._ends = np.cumsum([0, *map(len, self._pieces)])
        self.part = Part.of_spans([(at, len(octets)) for at, octets in pieces])
        self._itemsize = min((rows.itemsize for _, _, rows in weights.values()), default=1)
        self._checksums: dict[int, int] = {}
        """Of the buckets that were given out, by their first byte."""
        self._base = base if base is not None and base.part.n_bytes == self.part.n_bytes else None
        if base is not None:
            base.forget_base()

    def forget_base(self) -> None:
        """Free the memory of the version before; buckets travel whole from now on."""
        self._base = None

    def bucket(self, start: int, stop: int, whole: bool) -> tuple[Bucket, Octets]:
        """These bytes of the part, as what has changed in them unless `whole`, or unless that is much."""
        new = self._read(start, stop)
        bucket = bucket_of(self.version, self._rank, start, new)
        self._checksums[start] = bucket.checksum
        before = self._base  # another thread may take it away meanwhile, with newer weights
        checksum = None if before is None else before._checksums.get(start)
        if before is None or checksum is None:
            return bucket, new
        bucket = bucket._replace(base=checksum, itemsize=self._itemsize)
        return encode(bucket, before._read(start, stop), new, whole)

    def _read(self, start: int, stop: int) -> Octets:
        """A copy of these bytes."""
        first, last = np.searchsorted(self._ends[1:], [start, stop - 1], side="right")
        pieces = (self._pieces[n][max(start - self._ends[n], 0) : stop - self._ends[n]] for n in range(first, last + 1))
        return np.concatenate([*pieces])


def _pieces(weights: Mapping[str, Rows], rank: int) -> Iterator[tuple[int, Octets]]:
    """What a rank holds of the file, in its order, each with its first byte in the file; rank 0 has the header."""
    header = _header(weights)
    if rank == 0:
        yield 0, np.frombuffer(header, np.uint8)
    at = len(header)
    for shape, first, rows in weights.values():
        if rows.numel():
            yield at + first * prod(shape[1:]) * rows.itemsize, _octets(rows)
        at += prod(shape) * rows.itemsize


def _octets(rows: Tensor) -> Octets:
    return rows.contiguous().view(-1).view(torch.uint8).numpy()


def _header(weights: Mapping[str, Rows]) -> bytes:
    tensors, end = dict[str, object](), 0
    for name, (shape, _, rows) in weights.items():
        start, end = end, end + prod(shape) * rows.itemsize
        tensors[name] = {"dtype": TYPES[rows.dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(8, "little") + text
