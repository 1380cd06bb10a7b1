"""Counts the allocations, FLOPs and memory traffic of tensor operations; fake tensors are counted without computing."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from service.learn.estimate.gpus import REACHED
from service.learn.model.sharding import local_shard

HOST = "host"
"""Name of the part for tensors in CPU memory, which do not count as memory of the device."""

ELEMENTWISE = "elementwise"
"""Name of the kind of all operations that are neither matrix products nor attention, and do not involve the
vocabulary."""

PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm")
"""Names of the matrix products [.., m, k] x [.., k, n] of 2 m k n FLOPs; where the name has `add`, the first argument
is added to the product."""

COLLECTIVES = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "alltoall_base_")


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that tensors hold, by part, and the FLOPs and seconds of operations, by kind.

    A tensor is assigned to a part when it is allocated: `logits` if its shape contains the vocabulary, otherwise
    `activations`. `mark` assigns it to another part. The part `gathered` has the buffers of collectives and the
    storages that FSDP2 resizes.
    """

    def __init__(self, vocab_size: int, row_tokens: int) -> None:
        """`row_tokens`: number of tokens of each row; fake tensors have no values from which to read this number."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._vocab_size, self._row_tokens = vocab_size, row_tokens
        self._of_storage: weakref.WeakKeyDictionary[torch.UntypedStorage, list[Any]] = weakref.WeakKeyDictionary()
        self._held: Counter[str] = Counter()
        self._in_one_kernel = False
        self.peak: Counter[str] = Counter()
        """Bytes by part at the moment when the device's parts together were largest."""
        self.flops, self.sent = 0.0, 0.0
        """Floating-point operations of matrix products and attention; bytes that collectives received or sent."""
        self.seconds: dict[str, float] = defaultdict(float)
        """Seconds on an H100 by kind of operation, without collectives and the copies that FSDP2 makes for them."""

    def __enter__(self) -> Meter:
        # FSDP2 resizes storages directly, which is not an operation on a tensor
        self._resize_storage = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            resized = self._resize_storage(storage, size)
            self._hold(storage, "gathered")
            return resized

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize_storage  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on its local shards are dispatched next
        if function is torch.ops.aten.addmm.dtype_out and isinstance(args[0], FakeTensor):
            result = args[0]  # nothing is computed, and torch 2.11 fails
        else:
            result = function(*args, **(kwargs or {}))
        if not self._in_one_kernel:
            self._take(function._schema.name.split("::")[1], function, (args, kwargs), result)
        return result

    def one_kernel(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that a GPU runs as one elementwise kernel. Of the tensors that the function makes, only its
        result is counted as memory."""
        self._in_one_kernel = True
        try:
            result = function(*args)
        finally:
            self._in_one_kernel = False
        self._take(function.__name__, None, args, result)
        return result

    def _take(self, name: str, function: Any, args: Any, result: Any) -> None:
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor) and tensor.device.type != "meta"]
        fresh = [tensor for tensor in made if tensor.untyped_storage() not in self._of_storage]
        for tensor in fresh:
            self._hold(tensor.untyped_storage(), "logits" if self._vocab_size in tensor.shape else "activations")
        read = [tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor) and tensor.device.type != "meta"]
        if name in COLLECTIVES:
            self.sent += max(map(_bytes, read), default=0)
            for tensor in read:
                self._hold(tensor.untyped_storage(), "gathered")
        elif function is None or (
            function.namespace != "fsdp" and "empty" not in name and (fresh or function._schema.is_mutable)
        ):
            self._count(name, function, read, made)

    def _count(self, name: str, function: Any, read: list[Tensor], made: list[Tensor]) -> None:
        """Count an operation that writes to memory."""
        moved = sum(map(_bytes, (*read, *made)))
        if "varlen_attn" in name:
            backward = "backward" in name
            tokens, heads, head_dim = read[1 if backward else 0].shape
            flops = 2.0 * heads * head_dim * tokens * self._row_tokens * (2.5 if backward else 1)
            self._add("attention", flops, flops / (REACHED.attention_backward if backward else REACHED.attention))
        elif name in PRODUCTS:
            factors = read[1:3] if "add" in name else read[:2]
            flops = 2.0 * prod(factors[0].shape) * factors[1].shape[-1]
            self._add("products", flops, max(flops / REACHED.products, moved / REACHED.bandwidth))
        else:
            large = any(self._vocab_size in tensor.shape for tensor in read)
            self._add("logits" if large else ELEMENTWISE, 0.0, moved / REACHED.bandwidth)

    def _add(self, kind: str, flops: float, seconds: float) -> None:
        self.flops += flops
        self.seconds[kind] += seconds

    def _hold(self, storage: torch.UntypedStorage, part: str) -> None:
        """Assign a storage with its current size to a part."""
        if storage not in self._of_storage:
            self._of_storage[storage] = ["", 0]
            weakref.finalize(storage, self._count_bytes, self._of_storage[storage], "", 0)
        self._count_bytes(self._of_storage[storage], part, storage.nbytes())

    def _count_bytes(self, entry: list[Any], part: str, size: int) -> None:
        self._held[entry[0]] -= entry[1]
        entry[0], entry[1] = part or entry[0], size
        self._held[entry[0]] += size
        if self._held.total() - self._held[HOST] > self.peak.total():
            self.peak = Counter({part: held for part, held in self._held.items() if held and part != HOST})

    def mark(self, part: str, tensors: Iterable[Tensor | None]) -> None:
        """Assign the memory of these tensors to the part `part`, instead of the part that it was assigned to when it
        was allocated."""
        for tensor in tensors:
            if tensor is not None:
                self._hold(local_shard(tensor).untyped_storage(), part)

    def forget(self) -> None:
        """Reset the peak, the FLOPs, the bytes sent and the seconds; the bytes that tensors hold stay counted."""
        self.peak.clear()
        self.flops = self.sent = 0.0
        self.seconds.clear()


def _bytes(tensor: Tensor) -> int:
    return prod(tensor.shape) * tensor.element_size()
