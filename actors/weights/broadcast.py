"""Weights from the trainer's first rank to the engines by NCCL, through vLLM's own weight transfer interface.

    once an engine:   rank 0 joins <-> the engine's workers join      a group of 1 + tensor_parallel_size
    each update:      rank 0 begins to send -> the engine pauses, receives, resumes

Every engine has a group of its own, so one that starts again joins a new group and no other notices. What travels
beside is the announcement: name, type and shape of each tensor, in the order in which they are sent. vLLM is imported
inside functions, for a trainer without GPUs needs none of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from threading import Thread
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from actors.weights.weights_file import TIED_HEAD, WeightBytes

BACKEND = "nccl"
"""vLLM's name of the backend."""
BUFFER_BYTES = 256 << 20
"""Bytes that are broadcast at once; both ends have to agree."""
N_BUFFERS = 2

MeetingPoint = tuple[str, int]


class Announced(NamedTuple):
    """One tensor that will be sent."""

    name: str
    dtype: str
    """Torch's name of the type, such as `bfloat16`."""
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Its size."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


def announcement(weights: Mapping[str, Tensor]) -> bytes:
    """What an engine is told before it receives these weights."""
    return json.dumps(described(weights)).encode()


def described(weights: Mapping[str, Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of each tensor."""
    return [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in weights.items()]


def announced(data: WeightBytes, checksum: int, elements: int, tied: bool) -> list[Announced]:
    """The tensors that an announcement names.

    Raises:
        ValueError: it differs from what was sent, or names something else than the whole policy.
    """
    tensors = [Announced(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(checked(data, checksum))]
    refuse_parts(tensors, elements, tied)
    return tensors


def checked(data: WeightBytes, checksum: int) -> bytes:
    """An announcement's bytes; raises `ValueError` where they differ from what was sent."""
    octets = bytes(data)
    if xxhash.xxh3_64_intdigest(octets) != checksum:
        raise ValueError(f"an announcement of {len(octets)} bytes has another checksum than {checksum:016x}")
    return octets


def refuse_parts(tensors: Sequence[Announced], elements: int, tied: bool) -> None:
    """Raises `ValueError` where the tensors are not the whole policy."""
    brought = sum(math.prod(tensor.shape) for tensor in tensors if not (tied and tensor.name == TIED_HEAD))
    if brought != elements:
        raise ValueError(f"weights of {brought} numbers are announced, but the policy has {elements}")


def init_info(meeting_point: MeetingPoint, workers: int) -> dict[str, Any]:
    """What an engine's workers are told to join their group."""
    address, port = meeting_point
    return {
        "master_address": address,
        "master_port": port,
        "rank_offset": 1,
        "world_size": 1 + workers,
        "packed": True,
        "packed_buffer_size_bytes": BUFFER_BYTES,
        "packed_num_buffers": N_BUFFERS,
    }


def update_info(tensors: Sequence[Announced]) -> dict[str, Any]:
    """What an engine's workers are told about the tensors that they will receive."""
    return {
        "names": [tensor.name for tensor in tensors],
        "dtype_names": [tensor.dtype for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }


class Sender:
    """The trainer's end of one engine's group."""

    def __init__(self, meeting_point: MeetingPoint, workers: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        address, port = meeting_point
        self._group = trainer_init({"master_address": address, "master_port": port, "world_size": 1 + workers})

    def begin(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        """Send in the background; who waits for the weights notices where that fails, and has a deadline."""
        Thread(target=self._send, args=(weights, device), daemon=True, name="broadcast").start()

    def _send(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.set_device(device)
        packed_nccl_broadcast_producer(
            iterator=iter(weights.items()),
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1].to(device),
            buffer_size_bytes=BUFFER_BYTES,
            num_buffers=N_BUFFERS,
        )
