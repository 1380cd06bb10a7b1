"""The trainer's end of weights that go by memory: copies in CPU memory, given out in buckets of a safetensors file.

A safetensors file is `header length (8 bytes) | header (JSON) | data`. It is never made as a whole: a bucket is copied
from the tensors when it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from actors.weights.bucket import Bucket, Octets, bucket_of, encode

TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
"""What a header calls the types of weights."""
ALIGNED = 8
"""The data begin at a multiple of so many bytes."""


class Publication:
    """The weights of one version."""

    def __init__(self, version: int, weights: Mapping[str, Tensor], base: Publication | None = None) -> None:
        """`base`: the version before, of which only what has changed since is to travel."""
        self.version = version
        self._tensors = [tensor.contiguous().view(-1).view(torch.uint8).numpy() for tensor in weights.values()]
        self._tensors.insert(0, np.frombuffer(_header(weights), np.uint8))
        self._ends = np.cumsum([len(tensor) for tensor in self._tensors])
        self._itemsize = min((tensor.itemsize for tensor in weights.values()), default=1)
        self._checksums: dict[int, int] = {}
        """Of the buckets that were given out, by their first byte."""
        self._base = base if base is not None and base.n_bytes == self.n_bytes else None
        if base is not None:
            base._base = None

    @property
    def n_bytes(self) -> int:
        """Bytes of the file."""
        return int(self._ends[-1])

    def bucket(self, start: int, stop: int, whole: bool) -> tuple[Bucket, Octets]:
        """These bytes of the file, as what has changed in them unless `whole`, or unless that is much."""
        new = self._read(start, stop)
        bucket = bucket_of(self.version, start, new)
        self._checksums[start] = bucket.checksum
        before = self._base  # another thread may take it away meanwhile, with newer weights
        checksum = None if before is None else before._checksums.get(start)
        if before is None or checksum is None:
            return bucket, new
        bucket = bucket._replace(base=checksum, itemsize=self._itemsize)
        return encode(bucket, before._read(start, stop), new, whole)

    def _read(self, start: int, stop: int) -> Octets:
        """A copy of these bytes."""
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
        begins = [0, *self._ends]
        pieces = (self._tensors[n][max(start - begins[n], 0) : stop - begins[n]] for n in range(first, last + 1))
        return np.concatenate([*pieces])


def _header(weights: Mapping[str, Tensor]) -> bytes:
    tensors, end = dict[str, object](), 0
    for name, tensor in weights.items():
        start, end = end, end + tensor.nbytes
        tensors[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(8, "little") + text
