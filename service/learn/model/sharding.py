"""FSDP2 over the policy: sharded float32 weights, computed in the model's type, gradients summed in float32.

Weights of the loss are counted over the whole mini-batch beforehand, so gradients of the ranks are summed, not
averaged; and a mini-batch of several micro-batches reduces once, at the last one.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from service.learn.model.model import PolicyModel


def shard(
    model: PolicyModel, device: torch.device, world: int, compute: torch.dtype, cpu_offload: bool = False
) -> None:
    """Shard the model over all ranks, layer by layer."""
    mesh = init_device_mesh(device.type, (world,))
    reduce = torch.float64 if compute == torch.float64 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    # neither setting reaches the modules below; gloo, which reduces on CPU, cannot scale while it sums
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        if device.type == "cpu":
            module.set_force_sum_reduction_for_comms(True)


def reduce_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass reduces gradients over the ranks, or only accumulates them."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def forget_gathered(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass leaves gathered, lest the next one computes with old weights."""
    if isinstance(model, FSDPModule):
        model.reshard()


def _sharded(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
