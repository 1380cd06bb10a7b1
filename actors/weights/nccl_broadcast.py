"""Weights from the trainer's first rank to all engines at once, in buckets of bytes that may split tensors.

    rank 0        copies tensors into a bucket, broadcasts the bucket, fills the other one meanwhile
    each worker   receives a bucket, copies it into tensors, loads those that are complete

An announcement is sent separately from the tensors: name, type and shape of each, in the order in which they are sent.
Sender and receivers use it to cut the tensors in the same way. Tensors of 5, 3 and 4 bytes in buckets of 6:

    bucket 0   tensor 0 [0 1 2 3 4]   tensor 1 [0]
    bucket 1   tensor 1 [1 2]         tensor 2 [0 1 2 3]
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from threading import Lock, Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actors.weights.policy_tensors import TensorSpec
from actors.weights.weight_group import Meeting, WeightGroup
from service.errors import WeightsCutOff

log = logging.getLogger(__name__)

BROADCAST_BACKEND = "baton_broadcast"
"""Name of the weight transfer backend that `actors.engine.worker_extension` registers."""

N_BUCKETS = 2
"""The number of buckets: one that is being sent, and one that is filled or emptied meanwhile."""


class Piece(NamedTuple):
    """The part of one tensor in one bucket."""

    tensor: int
    """The tensor's number."""
    start: int
    """First byte of the piece in the tensor."""
    at: int
    """First byte of the piece in the bucket."""
    n_bytes: int


def cut(sizes: Sequence[int], bucket_bytes: int) -> Iterator[list[Piece]]:
    """Return the pieces in each bucket, for tensors of these sizes in bytes; all buckets but the last are full."""
    pieces: list[Piece] = []
    at = 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            n_bytes = min(size - start, bucket_bytes - at)
            pieces.append(Piece(tensor, start, at, n_bytes))
            start, at = start + n_bytes, at + n_bytes
            if at == bucket_bytes:
                yield pieces
                pieces, at = [], 0
    if pieces:
        yield pieces


def _buckets(meeting: Meeting, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    n_bytes = min(meeting.bucket_bytes, sum(sizes))
    return [torch.empty(n_bytes, dtype=torch.uint8, device=device) for _ in range(N_BUCKETS)]


def send(group: WeightGroup, weights: Mapping[str, Tensor], device: torch.device) -> None:
    """Broadcast these tensors, which may lie in CPU memory; holds two buckets on the device.

    Raises:
        WeightsCutOff: the group ended before all members had all tensors.
    """
    tensors = list(weights.values())
    sizes = [tensor.nbytes for tensor in tensors]
    buckets = _buckets(group.meeting, sizes, device)
    under_way: deque[Any] = deque()
    for number, pieces in enumerate(cut(sizes, group.meeting.bucket_bytes)):
        if len(under_way) == N_BUCKETS:
            group.wait(under_way.popleft())
        bucket = buckets[number % N_BUCKETS]
        for tensor, start, at, n_bytes in pieces:
            flat = tensors[tensor].contiguous().view(-1).view(torch.uint8)
            bucket[at : at + n_bytes].copy_(flat[start : start + n_bytes], non_blocking=True)
        under_way.append(group.broadcast(bucket[: at + n_bytes]))
    for work in under_way:
        group.wait(work)


def receive(group: WeightGroup, specs: Sequence[TensorSpec], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield each announced tensor as soon as it is complete; holds two buckets on the device.

    Raises:
        WeightsCutOff: the group ended before all tensors had arrived.
    """
    sizes = [spec.n_bytes for spec in specs]
    buckets = _buckets(group.meeting, sizes, device)
    cuts = list(cut(sizes, group.meeting.bucket_bytes))

    def begin(number: int) -> Any:
        _, _, at, n_bytes = cuts[number][-1]
        return group.broadcast(buckets[number % N_BUCKETS][: at + n_bytes])

    whole = torch.empty(0, dtype=torch.uint8)
    arriving = begin(0)
    for number, pieces in enumerate(cuts):
        arrived, arriving = arriving, begin(number + 1) if number + 1 < len(cuts) else None
        group.wait(arrived)
        for tensor, start, at, n_bytes in pieces:
            if start == 0:
                whole = torch.empty(sizes[tensor], dtype=torch.uint8, device=device)
            whole[start : start + n_bytes].copy_(buckets[number % N_BUCKETS][at : at + n_bytes])
            if start + n_bytes == sizes[tensor]:
                name, dtype, shape = specs[tensor]
                yield name, whole.view(getattr(torch, dtype)).view(shape)


class BroadcastSender:
    """The trainer's side, which sends in a thread and on a separate stream while the trainer continues."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._group: WeightGroup | None = None
        self._lock = Lock()

    def begin(self, meeting: Meeting, weights: Mapping[str, Tensor]) -> None:
        """Join the group, if it is new, and send; the engines learn of a failure from the group's store."""
        Thread(target=self._send, args=(meeting, weights), daemon=True, name="broadcast").start()

    def _send(self, meeting: Meeting, weights: Mapping[str, Tensor]) -> None:
        with self._lock:  # the previous broadcast has its own deadline
            try:
                if self._group is not None and self._group.meeting != meeting:
                    self._group.end("another group takes its place")
                    self._group = None
                self._group = group = self._group or WeightGroup(meeting, 0, self._device)
                with group.under_way(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
                    send(group, weights, self._device)
            except WeightsCutOff as error:
                log.warning("the broadcast of weights was cut off: %s", error)
