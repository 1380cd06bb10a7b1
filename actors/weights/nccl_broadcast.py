"""Weights from the trainer's first rank to the engines by NCCL, through vLLM's own weight transfer interface.

    once an engine:   rank 0 joins <-> the engine's workers join      a group of 1 + tensor_parallel_size
    each update:      rank 0 begins to send -> the engine pauses, receives, resumes

Every engine has a group of its own, so an engine that restarts joins a new group and the other engines go on. Beside
the tensors travels their announcement: name, type and shape of each, in the order in which they are sent. vLLM is
imported inside functions, because a trainer without GPUs does not need it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from actors.weights.checksum import PolicySize, TensorSpec, WeightBytes, verify

NCCL_BACKEND = "nccl"
"""vLLM's name of the backend."""
BUFFER_BYTES = 256 << 20
"""Bytes that are broadcast at once; both ends must use the same number."""
N_BUFFERS = 2

MeetingPoint = tuple[str, int]
"""Address and port at which a process group meets."""


def encode_announcement(weights: Mapping[str, Tensor]) -> bytes:
    """The tensors that will be sent, in order, as JSON."""
    return json.dumps(TensorSpec.of_weights(weights)).encode()


def decode_announcement(data: WeightBytes, checksum: int, size: PolicySize) -> list[TensorSpec]:
    """The tensors that an announcement names.

    Raises:
        ValueError: it differs from what was sent, or names more or less than the whole policy.
    """
    return size.checked_specs(json.loads(bytes(verify(data, checksum))))


def init_info(meeting_point: MeetingPoint, workers: int) -> dict[str, Any]:
    """vLLM's arguments for an engine's workers to join their group."""
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


def update_info(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """vLLM's arguments for an engine's workers to receive these tensors."""
    return {
        "names": [spec.name for spec in specs],
        "dtype_names": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


class NcclSender:
    """The trainer's end of one engine's group."""

    def __init__(self, meeting_point: MeetingPoint, workers: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        address, port = meeting_point
        self._group = trainer_init({"master_address": address, "master_port": port, "world_size": 1 + workers})

    def begin(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        """Send in the background; a failure shows at the engine, which waits for the weights with a deadline."""
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
