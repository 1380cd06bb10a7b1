"""Weights from a trainer's rank to the engine on the same GPU, by CUDA IPC through vLLM's own weight transfer.

    rank n   gathers all weights on its GPU, and tells where they lie: names, types, shapes and a handle of each
    engine n pauses, opens the handles, loads from that memory, closes them, resumes

vLLM would have the handles pickled on the way to its workers. Here they travel as plain values and the worker puts
them together again (`actors.weights.worker_extension`), so that nothing is unpickled:

    torch's arguments of `rebuild_cuda_tensor`       (Tensor, Size([4]), (1,), 0, ..., 0, b"\\x07...", 512, ...)
    as they travel, beside name, type and shape      {"storage_handle": "07...", "storage_size_bytes": 512, ...}
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.storage import TypedStorage

from actors.weights.broadcast import Announced, checked, described, refuse_parts, update_info
from actors.weights.weights_file import WeightBytes

IPC_BACKEND = "baton_ipc"
"""Name of the weight transfer backend that `actors.weights.worker_extension` registers."""

OCTETS = ("storage_handle", "ref_counter_handle", "event_handle")
NUMBERS = ("storage_size_bytes", "storage_offset_bytes", "ref_counter_offset", "event_sync_required", "tensor_offset")

Handle = dict[str, Any]
"""What opens one tensor's memory in another process: bytes as hexadecimal digits, numbers as they are."""


def handle_of(rebuilt_by: Mapping[str, Any]) -> Handle:
    """A handle, out of the arguments that torch would rebuild the tensor from, by their names."""
    return {name: bytes(rebuilt_by[name]).hex() for name in OCTETS} | {name: rebuilt_by[name] for name in NUMBERS}


def rebuilt_from(handle: Handle, tensor: Announced) -> tuple[Any, ...]:
    """The arguments, in torch's order, that rebuild a contiguous tensor on the first GPU of another process."""
    octets = {name: bytes.fromhex(handle[name]) for name in OCTETS}
    return (
        Tensor,
        torch.Size(tensor.shape),
        torch.empty(tensor.shape, device="meta").stride(),
        handle["tensor_offset"],
        TypedStorage,
        getattr(torch, tensor.dtype),
        0,
        octets["storage_handle"],
        handle["storage_size_bytes"],
        handle["storage_offset_bytes"],
        False,
        octets["ref_counter_handle"],
        handle["ref_counter_offset"],
        octets["event_handle"],
        handle["event_sync_required"],
    )


def shared(weights: Mapping[str, Tensor], device: torch.device) -> bytes:
    """What the engine on this GPU is told, to be opened once: each call counts as one more reader of the memory."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

    # The engine's process knows nothing of what this one has still queued.
    torch.cuda.synchronize(device)
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    reduced = (reduce_tensor(tensor)[1] for tensor in weights.values())  # type: ignore[no-untyped-call]
    handles = [handle_of(dict(zip(names, arguments, strict=True))) for arguments in reduced]
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return json.dumps({"tensors": described(weights), "gpu": gpu, "handles": handles}).encode()


def shared_update_info(data: WeightBytes, checksum: int, elements: int, tied: bool) -> tuple[dict[str, Any], int]:
    """What an engine's worker is told about weights on its GPU, and their bytes.

    Raises:
        ValueError: it differs from what was sent, or names something else than the whole policy.
    """
    told = json.loads(checked(data, checksum))
    tensors = [Announced(name, dtype, tuple(shape)) for name, dtype, shape in told["tensors"]]
    refuse_parts(tensors, elements, tied)
    info = update_info(tensors) | {"gpu": told["gpu"], "handles": told["handles"]}
    return info, sum(tensor.n_bytes for tensor in tensors)


def ipc_handles(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], gpu: str, handles: Sequence[Handle]
) -> list[dict[str, tuple[Any, ...]]]:
    """vLLM's own form of the handles: for each tensor, by GPU, what rebuilds it."""
    tensors = (Announced(name, dtype, tuple(shape)) for name, dtype, shape in zip(names, dtypes, shapes, strict=True))
    return [{gpu: rebuilt_from(handle, tensor)} for tensor, handle in zip(tensors, handles, strict=True)]
