"""Sends weights from a trainer's rank to the engine on the same GPU, by CUDA IPC through vLLM's own weight transfer.

    rank n     gathers all weights on its GPU; sends name, type, shape and a memory handle of each tensor
    engine n   pauses, opens the handles, loads from that memory, closes them, resumes

vLLM would pickle the handles on the way to its workers. This module sends them as JSON, and the worker converts them
to vLLM's form (`actors.engine.worker_extension`), so that nothing is unpickled:

    torch's arguments of `rebuild_cuda_tensor`       (Tensor, Size([4]), (1,), 0, ..., 0, b"\\x07...", 512, ...)
    a handle, beside name, type and shape            {"storage_handle": "07...", "storage_size_bytes": 512, ...}
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.storage import TypedStorage

from actors.weights.policy_tensors import TensorSpec, encode_announcement

IPC_BACKEND = "baton_ipc"
"""Name of the weight transfer backend that `actors.engine.worker_extension` registers."""

Handle = dict[str, Any]
"""The data with which another process opens one tensor's memory: bytes as hexadecimal digits, and numbers."""


def rebuild_arguments(handle: Handle, spec: TensorSpec) -> tuple[Any, ...]:
    """Return the arguments, in order, with which torch's `rebuild_cuda_tensor` opens the tensor of a handle in this
    process, as a contiguous tensor on the process's first GPU."""
    fields = {name: bytes.fromhex(value) if isinstance(value, str) else value for name, value in handle.items()}
    fields |= {"tensor_cls": Tensor, "storage_cls": TypedStorage, "storage_device": 0, "requires_grad": False}
    stride = torch.empty(spec.shape, device="meta").stride()
    fields |= {"tensor_size": torch.Size(spec.shape), "tensor_stride": stride, "dtype": getattr(torch, spec.dtype)}
    return tuple(fields[name] for name in inspect.signature(rebuild_cuda_tensor).parameters)


def encode_handles(weights: Mapping[str, Tensor], device: torch.device) -> bytes:
    """Encode handles of these tensors for the engine on this GPU. Each call counts one more reader of the memory,
    until the engine closes the handle; a handle that nobody opens, or that is opened twice, leaves a wrong count."""
    from torch.multiprocessing.reductions import reduce_tensor

    # The engine's process does not wait for kernels that this process has queued.
    torch.cuda.synchronize(device)
    names, handles = list(inspect.signature(rebuild_cuda_tensor).parameters), list[Handle]()
    for tensor in weights.values():
        arguments = zip(names, reduce_tensor(tensor)[1], strict=True)  # type: ignore[no-untyped-call]
        fields = {name: value for name, value in arguments if isinstance(value, bytes | int)}
        handles.append({name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()})
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return encode_announcement(weights, gpu=gpu, handles=handles)
