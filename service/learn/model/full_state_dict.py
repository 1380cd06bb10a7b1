"""The full state dict: whole weights from every rank's shards, on rank 0 in CPU memory or on every rank's device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def full_state_dict(
    parameters: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, rank: int, everywhere: bool = False
) -> dict[str, Tensor] | None:
    """Copies of all whole parameters, in this type; every rank must call.

    Rank 0 has them in CPU memory and the other ranks get None; with `everywhere` every rank has them on its device.
    Shards travel in the type asked for, over the device.
    """
    target = device if everywhere else torch.device("cpu")
    whole: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensor = parameter.detach()
        if isinstance(tensor, DTensor):
            shard = tensor.to_local().to(device, dtype)
            placed = tensor.device_mesh, tensor.placements
            tensor = DTensor.from_local(shard, *placed, shape=tensor.shape, stride=tensor.stride()).full_tensor()
        if everywhere or rank == 0:
            whole[name] = tensor.to(target, dtype, copy=True)
    return whole if everywhere or rank == 0 else None
