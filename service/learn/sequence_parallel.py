"""Sequence parallelism (Ulysses): the ranks of a group share a micro-batch, and each rank has some of its tokens.

Two ranks, six tokens, four heads:

    all but attention    rank 0   tokens 0 1 2   all heads       rank 1   tokens 3 4 5   all heads
    attention            rank 0   all tokens     heads 0 1       rank 1   all tokens     heads 2 3

An all-to-all before the attention call exchanges tokens for heads, and another all-to-all after the call exchanges
heads for tokens; the backward pass of each is an all-to-all in the other direction. If there are fewer key heads than
ranks, key heads are repeated.

Source: Jacobs et al. 2023 (DeepSpeed Ulysses), arXiv:2309.14509.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


class Slice(NamedTuple):
    """One rank's slice of each micro-batch that a group of ranks shares."""

    number: int = 0
    of: int = 1
    """Number of ranks in the group; the ranks have consecutive numbers."""
    group: Any = None
    """The process group of the ranks; None for a rank that computes whole micro-batches."""

    @staticmethod
    def of_rank(rank: int, world_size: int, ranks_of_group: int, device: torch.device) -> Slice:
        """The slice of each micro-batch that a rank computes; every rank must call this. The ranks divide into groups,
        and a group divides the model's heads."""
        if ranks_of_group == 1:
            return WHOLE
        shape = world_size // ranks_of_group, ranks_of_group
        group = init_device_mesh(device.type, shape, mesh_dim_names=("batch", "sequence")).get_group("sequence")
        return Slice(rank % ranks_of_group, ranks_of_group, group)


WHOLE = Slice()
"""The slice of a rank that computes whole micro-batches."""


class Exchange(NamedTuple):
    """The all-to-all exchanges before and after the attention of a micro-batch, among the ranks of a group."""

    group: dist.ProcessGroup
    n_slots: int
    """Number of slots of the whole micro-batch, without the padding that gives all ranks slices of equal size."""

    def own(self, value: Tensor) -> Tensor:
        """Select this rank's heads from a weight of all heads: [heads, ...] -> [own heads, ...]."""
        return value.chunk(self.group.size())[self.group.rank()]

    def to_channels(self, values: list[Tensor]) -> list[Tensor]:
        """Exchange all channels of this rank's slots for some channels of all slots. Each value:
        [own slots, channels, ...] -> [all slots, own channels, ...]."""
        ranks = self.group.size()
        by_rank = [x.reshape(len(x), ranks, -1, *x.shape[2:]).transpose(0, 1) for x in values]
        received = all_to_all(torch.cat(by_rank, 2), self.group).flatten(0, 1)[: self.n_slots]
        return list(torch.split(received, [x.shape[2] for x in by_rank], 1))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Exchange all heads of this rank's slots for some heads of all slots: [own slots, heads, head_dim] ->
        [all slots, own heads, head_dim]."""
        # rank r has the query heads from r * heads / ranks on, which share key head r * key heads / ranks
        copies = max(1, self.group.size() // key.shape[1])
        key, value = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value))
        return self.to_channels([query, key, value])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_slots(self, out: Tensor) -> Tensor:
        """Exchange some heads of all slots for all heads of this rank's slots: [all slots, own heads, head_dim] ->
        [own slots, heads, head_dim]."""
        ranks = self.group.size()
        filled = F.pad(out, (0, 0, 0, 0, 0, -self.n_slots % ranks))
        received = all_to_all(filled.view(ranks, -1, *out.shape[1:]), self.group)
        return received.transpose(0, 1).flatten(1, 2)


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange rows of a tensor among the ranks of a group: [one row for each rank, ...] -> [one row from each rank,
    ...]."""
    exchanged: Tensor = _AllToAll.apply(x, group)  # type: ignore[no-untyped-call]
    return exchanged


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        exchanged = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(exchanged, x.contiguous(), group=group)
        return exchanged

    @staticmethod
    def backward(ctx: Any, of_received: Tensor) -> tuple[Tensor, None]:
        return all_to_all(of_received, ctx.group), None
