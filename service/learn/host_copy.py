"""Copies of tensors in CPU memory: pinned where they come from a GPU, so that the bus copies at its own speed.

A copy into pageable memory goes through a buffer of the driver, a small piece at a time. Torch keeps pinned memory that
is given back for the next copies of the same sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def begin_host_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Begin to copy a tensor to CPU memory, in this type; the copy is whole after `finish_host_copies`."""
    source = tensor.detach().to(dtype or tensor.dtype)
    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    return copy.copy_(source, non_blocking=True)


def finish_host_copies() -> None:
    """Wait until all copies that this thread has begun on its GPU are whole."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


def host_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of a tensor in CPU memory, in this type."""
    copy = begin_host_copy(tensor, dtype)
    finish_host_copies()
    return copy
