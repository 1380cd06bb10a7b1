"""Shards the policy with FSDP2: shards are float32, the computation is in the model's data type, and gradients are
summed in float32.

The gradients of the ranks are summed, not averaged, because the loss weights of tokens come from counts over the whole
mini-batch.

Gradients are reduced after every micro-batch, so a rank keeps only the gradients of its shard: 4 bytes per parameter,
divided by the number of ranks. If gradients were reduced once per step, every rank would keep 4 bytes per parameter
until the last micro-batch. The price: each micro-batch sends 4 bytes per parameter for gradients, in addition to 4 for
gathering bfloat16 weights twice.

Shards are chunks of dimension 0, of equal size except the last:

    5 rows on 2 ranks       rank 0 holds rows 0 1 2      rank 1 holds rows 3 4

With `trainer.shard_within: node`, the ranks of each node share a complete copy of the model. Weights are gathered
within nodes only, and the gradients of shards are summed over nodes.

When weights are gathered:

    a layer             by itself
    an untied head      by itself, while the last layers compute; its gradient is reduced during their backward pass
    an untied embedding by itself; its backward pass needs no weight
    the rest            from the start of the forward pass to the end of the backward pass

The rest includes a tied embedding, which is needed first and last, and small layers, for which the latency of a message
costs more than its bytes.

`full_state_dict` gathers the whole weights; `local_rows` returns the rows of each weight that are on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
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
"""Number of parameters below which a layer is not gathered by itself, but with the rest of the model."""


def ranks_by_node(nodes: Sequence[str]) -> list[list[int]]:
    """For each node, its ranks. `nodes`: the node of each rank.

    Raises:
        UserError: some nodes have more ranks than others, so that shards would differ in size.
    """
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    if len({len(of_node) for of_node in ranks.values()}) > 1:
        held = ", ".join(str(len(of_node)) for of_node in ranks.values())
        raise UserError(
            f"trainer.shard_within: node needs equally many ranks on each node, but the nodes have {held}; choose "
            "trainer.ranks that fill whole nodes, or all"
        )
    return list(ranks.values())


def shard(
    model: nn.Module,
    units: Mapping[nn.Module, bool],
    device: torch.device,
    copies: Sequence[Sequence[int]],
    compute: torch.dtype,
    cpu_offload: bool = False,
) -> None:
    """Shard the model, and each module of `units` separately. The value of a unit is True if its gathered weights are
    freed after the forward pass.

    `copies`: for each copy of the model, the ranks that share it.
    """
    if len(copies) == 1:
        mesh = init_device_mesh(device.type, (len(copies[0]),))
    else:
        mesh = DeviceMesh(device.type, [list(ranks) for ranks in copies], mesh_dim_names=("node", "rank"))
    reduce = accumulation_dtype(compute)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy()
    large = [unit for unit in units if sum(map(torch.numel, unit.parameters())) >= SMALL_LAYER]
    for module in (*large, model):
        again = units.get(module)
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=again)
    for unit in _sharded(model):  # submodules do not inherit settings
        unit.set_gradient_divide_factor(1.0)
        # otherwise FSDP2 asks for a sum with a factor, which gloo cannot compute and NCCL computes more slowly
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_unshard_in_backward(not isinstance(unit, nn.Embedding))


def set_collective_deadline(seconds: float) -> None:
    """Set the number of seconds within which later collectives must end, for every process group of this rank."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights after a forward pass without a backward pass; otherwise the next pass would use the old
    weights."""
    for module in _sharded(model):
        module.reshard()


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def shard_bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Start and end of a rank's rows of a weight with `length` rows, divided among the ranks as FSDP2 does."""
    size = -(-length // world_size)
    start = min(rank * size, length)
    return start, min(start + size, length)


def shard_rows(parameter: Tensor) -> slice:
    """The rows of a parameter that this rank holds: the rows of its shard, or all rows if the parameter is not
    sharded."""
    if not isinstance(parameter, DTensor):
        return slice(None)
    axis = _row_axis(parameter)
    mesh = parameter.device_mesh
    return slice(*shard_bounds(len(parameter), mesh.get_local_rank(axis), mesh.size(axis)))


def _row_axis(parameter: DTensor) -> int:
    *copies, rows = parameter.placements
    if rows != Shard(0) or not all(placement.is_replicate() for placement in copies):
        raise ValueError(f"unexpected placements {parameter.placements}")
    return len(copies)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class WeightRows(NamedTuple):
    """Consecutive rows of a weight, with their place in the weight."""

    shape: tuple[int, ...]
    """Shape of the whole weight."""
    first: int
    """Index of the first of these rows in the whole weight."""
    rows: Tensor
    """[R, ...] the values of the rows; R may be 0."""


@torch.no_grad()
def local_rows(parameters: Mapping[str, Tensor]) -> dict[str, WeightRows]:
    """This rank's rows of each parameter, without a copy.

    If there are several copies of the model, only the ranks of the first copy return rows; other ranks return no rows.
    """
    return {
        name: WeightRows(tuple(parameter.shape), shard_rows(parameter).start or 0, _held(parameter))
        for name, parameter in parameters.items()
    }


def _held(parameter: Tensor) -> Tensor:
    """This rank's rows; no rows if the rank does not belong to the first copy of the model."""
    rows = local_shard(parameter.detach())
    if not isinstance(parameter, DTensor):
        return rows
    coordinate = parameter.device_mesh.get_coordinate() or ()
    return rows[:0] if any(coordinate[: _row_axis(parameter)]) else rows


@torch.no_grad()
def full_state_dict(
    parameters: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, rank: int, everywhere: bool = False
) -> dict[str, Tensor] | None:
    """Copies of all parameters, each as a whole tensor of type `dtype`; every rank must call this.

    Rank 0 gets the copies in CPU memory, and the other ranks get None. With `everywhere`, every rank gets the copies on
    its device. Shards are cast to `dtype` before they are sent.
    """
    whole: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensor = _gathered(parameter, dtype, device) if isinstance(parameter, DTensor) else parameter.detach()
        if everywhere:
            whole[name] = tensor.to(device, dtype, copy=True)
        elif rank == 0:
            whole[name] = tensor.to("cpu", dtype, copy=True)  # not pinned, because each copy is used once
    return whole if everywhere or rank == 0 else None


def _gathered(parameter: DTensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The whole tensor of a sharded parameter, gathered as `dtype`. Shards are padded to equal size: of the rows 0 1 2
    on two ranks, rank 0 sends 0 1, and rank 1 sends 2 and padding."""
    axis, shard = _row_axis(parameter), local_shard(parameter.detach())
    ranks = parameter.device_mesh.size(axis)
    rows = -(-len(parameter) // ranks)
    own = torch.zeros(rows, *parameter.shape[1:], dtype=dtype, device=device)
    own[: len(shard)] = shard
    gathered = torch.empty(ranks * rows, *parameter.shape[1:], dtype=dtype, device=device)
    dist.all_gather_single(gathered, own, group=parameter.device_mesh.get_group(axis))
    return gathered[: len(parameter)]
