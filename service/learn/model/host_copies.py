"""Copies of tensors in CPU memory, for checkpoints and for states that are offloaded."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import finalize

import torch
from torch import Tensor


class HostCopies:
    """Copies of tensors in one piece of CPU memory, which is allocated and registered with CUDA once.

    Torch's own pinned memory rounds each tensor up to a power of two. Its options against that do not serve: with
    `pinned_max_round_threshold_mb` torch 2.13 reuses a block for a larger tensor, and blocks beyond
    `pinned_max_cached_size_mb` are pinned anew each time.
    """

    def __init__(self) -> None:
        self._octets = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, tensors: Iterable[Tensor]) -> Tensor:
        """Copy tensors, which must come with the largest elements first, so that all are aligned. Returns their bytes
        one after another, [n] uint8, which are valid until the next call."""
        tensors = [*tensors]
        if (n_bytes := sum(tensor.nbytes for tensor in tensors)) > len(self._octets):
            self._octets = torch.empty(n_bytes, dtype=torch.uint8)
            register(self._octets)
        copies = torch.split(self._octets[:n_bytes], [tensor.nbytes for tensor in tensors])
        for tensor, copy in zip(tensors, copies, strict=True):
            copy.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        finish_copies()
        return self._octets[:n_bytes]


def register(octets: Tensor) -> None:
    """If this process uses a GPU, register host memory with CUDA until the memory is unmapped. Then copies do not go
    through buffers of CUDA's driver.

    Raises:
        RuntimeError: CUDA refuses.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        runtime, at = torch.cuda.cudart(), octets.data_ptr()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(at, octets.nbytes, 0))
        finalize(octets.untyped_storage(), runtime.cudaHostUnregister, at).atexit = False


def finish_copies() -> None:
    """Wait until all copies that this thread has begun on its GPU are complete."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


def host_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of a tensor in CPU memory, cast to `dtype`. The copy of a tensor on a GPU is pinned, because copies to
    pageable memory are slower; torch reuses freed pinned memory for later copies of the same size."""
    source = tensor.detach().to(dtype or tensor.dtype)
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda).copy_(source)
