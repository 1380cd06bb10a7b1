"""Whole weights out of every rank's shards, in few collectives: on rank 0 alone, or on every rank's device.

Shards are chunks of dimension 0; on the way each is padded to the size of a full chunk, so that all ranks send alike:

    5 rows on 2 ranks       rank 0 sends rows 0 1 2      rank 1 sends rows 3 4 -
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from service.learn.model.hf_checkpoint import chunk
from service.learn.model.master_weights import local

BUCKET_BYTES = 256 << 20
"""What a rank sends at once, about."""


@torch.no_grad()
def gather_whole(
    parameters: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, rank: int, world: int
) -> dict[str, Tensor] | None:
    """All parameters in CPU memory, as copies; None on ranks other than 0. Every rank must call."""
    if world == 1:
        return _copies(parameters, dtype, torch.device("cpu"))
    whole: dict[str, Tensor] = {}
    for names in _buckets(parameters, dtype, world):
        octets = _sent(names, parameters, dtype, device, world)
        received = [torch.empty_like(octets) for _ in range(world)] if rank == 0 else None
        dist.gather(octets, received, dst=0)
        if received is not None:
            whole |= _reassembled(names, parameters, [part.to("cpu").view(dtype) for part in received])
    return whole if rank == 0 else None


@torch.no_grad()
def gather_everywhere(
    parameters: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, world: int
) -> dict[str, Tensor]:
    """All parameters on the device of every rank, as copies. Every rank must call."""
    if world == 1:
        return _copies(parameters, dtype, device)
    whole: dict[str, Tensor] = {}
    for names in _buckets(parameters, dtype, world):
        octets = _sent(names, parameters, dtype, device, world)
        received = [torch.empty_like(octets) for _ in range(world)]
        dist.all_gather(received, octets)
        whole |= _reassembled(names, parameters, [part.view(dtype) for part in received])
    return whole


def _copies(parameters: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    return {name: parameter.detach().to(device, dtype, copy=True) for name, parameter in parameters.items()}


def _sent(
    names: Sequence[str], parameters: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, world: int
) -> Tensor:
    """What a rank sends of some parameters, as bytes: not every backend knows every number type."""
    return torch.cat([_padded(parameters[name], dtype, device, world).flatten() for name in names]).view(torch.uint8)


def _buckets(parameters: Mapping[str, Tensor], dtype: torch.dtype, world: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, parameter in parameters.items():
        own = parameter.numel() * dtype.itemsize // world
        if names and size + own > BUCKET_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    if names:
        yield names


def _padded(parameter: Tensor, dtype: torch.dtype, device: torch.device, world: int) -> Tensor:
    rows = local(parameter.detach()).to(device, dtype)
    size = -(-parameter.shape[0] // world)
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])


def _reassembled(
    names: Sequence[str], parameters: Mapping[str, Tensor], received: Sequence[Tensor]
) -> dict[str, Tensor]:
    whole, at = {}, 0
    for name in names:
        shape = parameters[name].shape
        size = -(-shape[0] // len(received)) * shape[1:].numel()
        rows = []
        for rank, part in enumerate(received):
            start, stop = chunk(shape[0], rank, len(received))
            rows.append(part[at : at + size].view(-1, *shape[1:])[: stop - start])
        whole[name] = torch.cat(rows)
        at += size
    return whole
