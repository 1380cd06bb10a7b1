"""Expert parallelism: the ranks of a group divide the experts of each layer, and send tokens to the ranks of their
experts.

Two ranks, four experts, two tokens on each rank, one expert per token:

    chosen        rank 0   a: 3   b: 0       rank 1   c: 1   d: 3
    computed      rank 0   b: 0   c: 1       rank 1   a: 3   d: 3
    returned      rank 0   a   b             rank 1   c   d

The ranks of a group compute their micro-batches at the same time, so each token can be sent to the ranks of its
experts. The gradient of an expert is the sum over the tokens of the whole group. The weights of an expert are sharded
only over its rank and the ranks with the same index in other groups. Among these ranks FSDP2 gathers the weights and
reduces the gradients.

The family's own code computes both the router and the experts. The token's rank chooses the token's experts and the
weight of each expert. The expert's rank computes the expert's output and multiplies it by the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from service.errors import UserError
from service.learn.model.sharding import local_shard
from service.learn.sequence_parallel import all_to_all
from service.model_folder import undivided_experts


def check_groups(ranks: int, of_group: int, nodes: Sequence[str] | None) -> None:
    """Check that the ranks divide into groups of `of_group` consecutive ranks, and that each group is on one node.

    Raises:
        UserError: the ranks do not divide into such groups.
    """
    groups = [range(first, first + of_group) for first in range(0, ranks, of_group)]
    if ranks % of_group or (nodes is not None and any(len({nodes[rank] for rank in group}) > 1 for group in groups)):
        raise UserError(
            f"trainer.expert_parallel: the {ranks} ranks of a copy of the policy do not divide into groups of "
            f"{of_group} ranks on one node each; use a divisor of the ranks of every node"
        )


def divided_experts(
    layers: Iterable[Any], copies: Sequence[Sequence[int]], of_group: int, device: str
) -> dict[nn.Module, DeviceMesh]:
    """Divide the experts of all layers among the ranks of each group. Returns, for each module of experts, the ranks
    among which its weights are to be sharded further; an empty dictionary for groups of one rank.

    `copies`: for each copy of the model, the ranks that share it; `of_group`: the number of ranks in a group.

    Raises:
        UserError: a layer's experts cannot be divided.
    """
    if of_group == 1:
        return {}
    ranks = torch.tensor([list(copy) for copy in copies]).view(len(copies), -1, of_group)
    names = ("node", "rank", "expert")
    if len(copies) == 1:
        ranks, names = ranks[0], names[1:]  # type: ignore[assignment]
    mesh = DeviceMesh(device, ranks, mesh_dim_names=names)
    modules = [layer.mlp.experts for layer in layers if hasattr(layer.mlp, "experts")]
    if not modules:
        raise UserError("trainer.expert_parallel: the model has no experts to divide; use 1")
    for experts in modules:
        _divide(experts, mesh["expert"])
    return dict.fromkeys(modules, mesh[names[:-1]])


def _divide(experts: Any, mesh: DeviceMesh) -> None:
    """Keep only this rank's experts, and exchange tokens in the forward pass."""
    parameters = dict(experts.named_parameters())
    # modules outside transformers' interface of experts may take other arguments
    if not hasattr(experts, "is_transposed") or any(len(p) != experts.num_experts for p in parameters.values()):
        raise UserError(f"trainer.expert_parallel: {type(experts).__name__} has no experts that can be divided; use 1")
    if why := undivided_experts(experts.num_experts, mesh.size()):
        raise UserError(f"trainer.expert_parallel: {why}")
    for name, parameter in parameters.items():
        own = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()]
        held = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(held, requires_grad=parameter.requires_grad))
    experts.forward = partial(_exchanged, experts, mesh.get_group())


class _OwnExperts:
    """A module of experts for the family's code, with the gathered weights of this rank's experts only."""

    def __init__(self, experts: nn.Module, number: int) -> None:
        self._experts, self.num_experts = experts, number
        for name, parameter in experts.named_parameters():
            setattr(self, name, local_shard(parameter))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


def _exchanged(
    experts: Any, group: dist.ProcessGroup, hidden_ND: Tensor, chosen_NK: Tensor, weight_NK: Tensor
) -> Tensor:
    """[N, D] the sum of the outputs of each token's experts, on whichever ranks these experts are.

    Axes: N tokens; K experts of a token; X pairs of both, sorted by expert; Y pairs that this rank computes.
    """
    topk, ranks = chosen_NK.shape[-1], group.size()
    sorted_X, order_X = chosen_NK.reshape(-1).sort(stable=True)
    bounds_E = torch.searchsorted(sorted_X, torch.arange(experts.num_experts + 1, device=sorted_X.device))
    sent_RE = bounds_E.diff().view(ranks, -1)
    received_RE = torch.empty_like(sent_RE)
    dist.all_to_all_single(received_RE, sent_RE, group=group)
    sent, received = _sums(sent_RE, received_RE, len(order_X))
    state_YD = all_to_all(hidden_ND[order_X // topk], group, received, sent)
    weight_Y = all_to_all(weight_NK.reshape(-1)[order_X], group, received, sent)
    expert_Y = torch.arange(sent_RE.shape[1], device=sorted_X.device).repeat(ranks)
    expert_Y = expert_Y.repeat_interleave(received_RE.flatten(), output_size=sum(received))
    # without any token the weights would have no gradient here, and the other ranks would wait for one
    if idle := not sum(received):
        given = (torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (state_YD, weight_Y, expert_Y))
        state_YD, weight_Y, expert_Y = given
    own = _OwnExperts(experts, sent_RE.shape[1])
    out_YD = type(experts).forward(own, state_YD, expert_Y[:, None], weight_Y[:, None])
    out_XD = all_to_all(out_YD[: len(out_YD) - idle], group, sent, received)
    out_ND: Tensor = out_XD[order_X.argsort()].view(-1, topk, out_XD.shape[-1]).sum(1)
    return out_ND


def _sums(sent_RE: Tensor, received_RE: Tensor, pairs: int) -> tuple[list[int], list[int]]:
    """The number of pairs to send to each rank, and to receive from it; waits for the device. With fake tensors the
    numbers are assumed to be equal."""
    if isinstance(sent_RE, FakeTensor):
        even = [len(part) for part in torch.tensor_split(torch.empty(pairs, device="meta"), len(sent_RE))]
        return even, even
    sent, received = torch.stack((sent_RE.sum(1), received_RE.sum(1))).tolist()
    return sent, received
