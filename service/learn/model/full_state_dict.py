"""The full state dict: whole weights out of every rank's shards, on rank 0 in CPU memory or on every rank's device.

A collective sends a bucket of weights. Each shard is padded to the size of the first, so that all ranks send alike:

    5 rows on 2 ranks       rank 0 sends rows 0 1 2      rank 1 sends rows 3 4 -
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from service.learn.model.sharding import local_shard, shard_bounds

BUCKET_BYTES = 256 << 20
"""Bytes that a rank sends in one collective, about."""


@torch.no_grad()
def full_state_dict(
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    world_size: int,
    everywhere: bool = False,
) -> dict[str, Tensor] | None:
    """Copies of all whole parameters, in this type; every rank must call.

    Rank 0 has them in CPU memory and the other ranks get None; with `everywhere` every rank has them on its device.
    """
    target = device if everywhere else torch.device("cpu")
    if world_size == 1:
        return {name: parameter.detach().to(target, dtype, copy=True) for name, parameter in parameters.items()}
    whole: dict[str, Tensor] = {}
    for names in _buckets(parameters, dtype, world_size):
        shards = [_padded_shard(parameters[name], dtype, device, world_size).flatten() for name in names]
        # as bytes, because gloo does not support every number type
        sent = torch.cat(shards).view(torch.uint8)
        received = [torch.empty_like(sent) for _ in range(world_size)] if everywhere or rank == 0 else None
        if everywhere:
            dist.all_gather(received, sent)
        else:
            dist.gather(sent, received, dst=0)
        if received is not None:
            whole |= _joined(names, parameters, [part.to(target).view(dtype) for part in received])
    return whole if everywhere or rank == 0 else None


def _buckets(parameters: Mapping[str, Tensor], dtype: torch.dtype, world_size: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, parameter in parameters.items():
        shard_bytes = parameter.numel() * dtype.itemsize // world_size
        if names and size + shard_bytes > BUCKET_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += shard_bytes
    if names:
        yield names


def _padded_shard(parameter: Tensor, dtype: torch.dtype, device: torch.device, world_size: int) -> Tensor:
    rows = local_shard(parameter.detach()).to(device, dtype)
    size = -(-parameter.shape[0] // world_size)
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])


def _joined(names: Sequence[str], parameters: Mapping[str, Tensor], received: Sequence[Tensor]) -> dict[str, Tensor]:
    """The bucket's parameters, from what each rank sent."""
    whole, at = {}, 0
    for name in names:
        shape = parameters[name].shape
        size = -(-shape[0] // len(received)) * shape[1:].numel()
        rows = []
        for rank, part in enumerate(received):
            start, stop = shard_bounds(shape[0], rank, len(received))
            rows.append(part[at : at + size].view(-1, *shape[1:])[: stop - start])
        whole[name] = torch.cat(rows)
        at += size
    return whole
