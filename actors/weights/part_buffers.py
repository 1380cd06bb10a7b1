"""A rank's part of the newest weights, in memory that engines of its host and generators of other hosts read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from actors.weights.memory import NO_VERSION, WeightMemory
from actors.weights.nixl_reads import NixlAgent, ReadFailed, RemoteMemory
from actors.weights.part import Source, WeightBucket, WeightPart
from actors.weights.policy_tensors import Octets, checksum_of
from service.learn.checkpoint import file_header
from service.learn.model.host_copies import finish_copies, register
from service.learn.model.sharding import WeightRows


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
        self._agent: NixlAgent | None = None

    @property
    def source(self) -> Source:
        """Return the place from which processes of this host read the newest version."""
        return Source(self.part, self._memory.path, self._memory.start(self._newest), self._newest)

    def copy(self, version: int, weights: Mapping[str, WeightRows], dtype: torch.dtype) -> None:
        """Copy the part of a version, converted to `dtype`, into the buffer with the older version."""
        pieces = list(_pieces(weights, self._rank, dtype))
        part = WeightPart.of_spans([(at, source.numel() * kind.itemsize) for at, source, kind in pieces])
        with self._lock:
            self.version = None  # no version until all bytes are there
            if part != self.part:
                memory = WeightMemory(part.n_bytes, 2)
                register(memory.whole)
                self._memory.close()
                self._agent = None
                self._memory, self.part = memory, part
            self._newest = 1 - self._newest
            self._memory.mark(NO_VERSION, self._newest)
            left = self._memory.octets(self._newest)
            for _, source, kind in pieces:
                octets, left = left.tensor_split([source.numel() * kind.itemsize])
                octets.view(kind).view(source.shape).copy_(source, non_blocking=True)
            finish_copies()
            self._memory.mark(version, self._newest)
            self.version = version

    def share(self) -> tuple[RemoteMemory | None, str]:
        """Let generators of other hosts read both buffers. Returns the memory and an empty text, or None and the reason
        why NIXL cannot be used."""
        with self._lock:
            try:
                self._agent = self._agent or NixlAgent()
                return self._agent.share(self._memory), ""
            except ReadFailed as failed:
                return None, str(failed)

    def bucket(self, version: int, start: int, stop: int) -> tuple[WeightBucket, Octets] | None:
        """Return the bytes from `start` to `stop` of the part, with their description; None if `version` is not the
        newest version."""
        with self._lock:
            if version != self.version:
                return None
            octets = self._memory.octets(self._newest)[start:stop].numpy()
            message: Octets = octets.copy()  # the buffer may change before the message is sent
            return WeightBucket((*self.part.within(start, stop),), checksum_of(message)), message


def _pieces(
    weights: Mapping[str, WeightRows], rank: int, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor, torch.dtype]]:
    """Yield a rank's tensors in the order of the file, each with its byte offset and dtype there; rank 0 also yields
    the header, first."""
    header = file_header({name: (dtype, shape) for name, (shape, _, _) in weights.items()})
    if rank == 0:
        yield 0, torch.from_numpy(np.frombuffer(bytearray(header), np.uint8)), torch.uint8
    at = len(header)
    for shape, first, rows in weights.values():
        if rows.numel():
            yield at + first * prod(shape[1:]) * dtype.itemsize, rows, dtype
        at += prod(shape) * dtype.itemsize
