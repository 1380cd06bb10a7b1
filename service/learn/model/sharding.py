"""FSDP2 over the policy: sharded float32 weights, computed in the model's type, gradients summed in float32.

Token weights of the loss count tokens of the whole mini-batch, so gradients of the ranks are summed, not averaged. The
gradients are reduced after every micro-batch, so a rank keeps only those of its shard: 4 bytes per parameter, divided
by the number of ranks. Without that, every rank would keep 4 bytes per parameter until the last micro-batch. The
reduction sends 4 bytes per parameter and micro-batch, in addition to 4 for gathering bfloat16 weights twice.

Shards are chunks of dimension 0, all of one size but the last:

    5 rows on 2 ranks       rank 0 holds rows 0 1 2      rank 1 holds rows 3 4

With `trainer.shard_within: node` each node has a complete copy in shards: weights are gathered within nodes only, and
gradients of shards are summed over nodes.

Layers are gathered one at a time. Small layers, for which the latency of a message costs more than its bytes, are
gathered together with the rest of the model.

`full_state_dict` gathers the whole weights, `local_rows` copies this rank's rows of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from service.errors import UserError
from service.learn.model.logprob import accumulation_dtype

SMALL_LAYER = 1 << 20
"""Parameters below which a layer is gathered with the rest of the model."""
MESSAGE_BYTES = 32 << 20
"""Bytes of parameters that are collected before they are gathered in one message."""


def ranks_by_node(nodes: Sequence[str]) -> list[list[int]]:
    """The ranks of each node, from the node of each rank.

    Raises:
        UserError: some nodes have more ranks than others, so that shards would differ in size.
    """
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    if len({len(of_node) for of_node in ranks.values()}) > 1:
        held = ", ".join(str(len(of_node)) for of_node in ranks.values())
        raise UserError(
            f"trainer.shard_within: node needs as many ranks on each node, but the nodes have {held}; choose "
            "trainer.ranks that fill whole nodes, or all"
        )
    return list(ranks.values())


def shard(
    model: nn.Module,
    layers: Iterable[nn.Module],
    device: torch.device,
    copies: Sequence[Sequence[int]],
    compute: torch.dtype,
    cpu_offload: bool = False,
) -> None:
    """Shard the model layer by layer; `copies`: for each copy of the model, the ranks that share it."""
    large = [layer for layer in layers if sum(map(torch.numel, layer.parameters())) >= SMALL_LAYER]
    if len(copies) == 1:
        mesh = init_device_mesh(device.type, (len(copies[0]),))
    else:
        mesh = DeviceMesh(device.type, [list(ranks) for ranks in copies], mesh_dim_names=("node", "rank"))
    reduce = accumulation_dtype(compute)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy()
    for module in (*large, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    # neither setting is inherited by submodules; gloo, which reduces on CPU, cannot scale while it sums
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            if device.type == "cpu":
                module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights after a forward pass without a backward pass; the next pass would use them again."""
    if isinstance(model, FSDPModule):
        model.reshard()


def shard_bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Start and end of a rank's rows if a dimension 0 of this length is split as by FSDP2."""
    size = -(-length // world_size)
    start = min(rank * size, length)
    return start, min(start + size, length)


def shard_rows(parameter: Tensor) -> slice:
    """The rows of a parameter that this rank holds: all, or its shard."""
    if not isinstance(parameter, DTensor):
        return slice(None)
    *copies, last = parameter.placements
    if last != Shard(0) or any(not placement.is_replicate() for placement in copies):
        raise ValueError(f"unexpected placements {parameter.placements}")
    mesh, dimension = parameter.device_mesh, len(copies)
    return slice(*shard_bounds(parameter.shape[0], mesh.get_local_rank(dimension), mesh.size(dimension)))


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor; the result shares the tensor's storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Rows(NamedTuple):
    """Consecutive rows of a weight."""

    shape: tuple[int, ...]
    """Shape of the whole weight."""
    first: int
    """Number of the first row."""
    rows: Tensor
    """[R, ...] the rows; R may be 0."""


@torch.no_grad()
def local_rows(parameters: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Rows]:
    """Copies of this rank's rows of all parameters, as `dtype` and in CPU memory.

    If there are several copies of the model, the ranks of the first copy return all rows and the other ranks none.
    """
    copies = {
        name: Rows(tuple(parameter.shape), shard_rows(parameter).start or 0, begin_host_copy(_held(parameter), dtype))
        for name, parameter in parameters.items()
    }
    finish_host_copies()
    return copies


def _held(parameter: Tensor) -> Tensor:
    """This rank's rows; none if the rank belongs to another copy of the model than the first."""
    rows = local_shard(parameter.detach())
    if not isinstance(parameter, DTensor):
        return rows
    *copies, _ = parameter.device_mesh.get_coordinate() or [0]
    return rows[:0] if any(copies) else rows


@torch.no_grad()
def full_state_dict(
    parameters: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, rank: int, everywhere: bool = False
) -> dict[str, Tensor] | None:
    """Copies of all whole parameters, as `dtype`; every rank must call.

    Rank 0 has them in CPU memory and the other ranks get None; with `everywhere` every rank has them on its device.
    Shards are cast to `dtype` before they are sent.
    """
    whole: dict[str, Tensor] = {}
    for name, tensor in _whole_tensors(parameters, dtype, device):
        if everywhere:
            whole[name] = tensor.to(device, dtype, copy=True)
        elif rank == 0:
            whole[name] = begin_host_copy(tensor, dtype)
    finish_host_copies()
    return whole if everywhere or rank == 0 else None


def _whole_tensors(
    parameters: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Each parameter by name; sharded ones are gathered as `dtype`, several per message."""
    together: dict[str, DTensor] = {}
    for name, parameter in parameters.items():
        if not isinstance(parameter, DTensor):
            yield name, parameter.detach()
            continue
        together[name] = parameter
        if sum(map(torch.numel, together.values())) * dtype.itemsize >= MESSAGE_BYTES:
            yield from _gathered(together, dtype, device)
            together = {}
    if together:
        yield from _gathered(together, dtype, device)


def _gathered(
    parameters: Mapping[str, DTensor], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors of parameters with the same sharding.

    Rows 0 1 2 and 0 1 2 3 on two ranks: rank 0 sends 0 1 | 0 1, rank 1 sends 2 . | 2 3.
    """
    mesh = next(iter(parameters.values())).device_mesh
    n_ranks, group = mesh.size(mesh.ndim - 1), mesh.get_group(mesh.ndim - 1)
    sizes = [shard_bounds(len(p), 0, n_ranks)[1] * math.prod(p.shape[1:]) for p in parameters.values()]
    own = torch.zeros(sum(sizes), dtype=dtype, device=device)
    for place, parameter in zip(torch.split(own, sizes), parameters.values(), strict=True):
        rows = local_shard(parameter.detach())
        place[: rows.numel()] = rows.reshape(-1)
    gathered = torch.empty(n_ranks * len(own), dtype=dtype, device=device)
    dist.all_gather_single(gathered, own, group=group)
    of_ranks = gathered.view(n_ranks, -1)
    for of_parameter, (name, parameter) in zip(torch.split(of_ranks, sizes, dim=1), parameters.items(), strict=True):
        yield name, of_parameter.reshape(-1, *parameter.shape[1:])[: len(parameter)]


def begin_host_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Begin to copy a tensor to CPU memory as `dtype`; the copy is complete after `finish_host_copies`.

    A GPU's tensors are copied to pinned memory, because a copy to pageable memory goes through a small buffer of the
    driver. Torch reuses freed pinned memory for later copies of the same sizes.
    """
    source = tensor.detach().to(dtype or tensor.dtype)
    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    return copy.copy_(source, non_blocking=True)


def finish_host_copies() -> None:
    """Wait until all copies that this thread has begun on its GPU are complete."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


def host_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of a tensor in CPU memory, as `dtype`."""
    copy = begin_host_copy(tensor, dtype)
    finish_host_copies()
    return copy
