"""Low-rank adapters (LoRA, arXiv 2106.09685) in a model's linear layers: the base model is frozen, A and B are trained.

    y = x W^T + bias + alpha / rank (x A^T) B^T        W [out, in]      A [rank, in]      B [out, rank]

A layer with an adapter keeps its place in the model and the names of its parameters. It gets two more parameters, with
the names that PEFT uses:

    model.layers.0.self_attn.q_proj.weight             frozen
    model.layers.0.self_attn.q_proj.lora_A.weight      trained
    model.layers.0.self_attn.q_proj.lora_B.weight      trained; 0 at first, so that the adapter starts without effect

The adapter is added before the model is sharded. If the model is sharded, A and B are float32, and are gathered in the
type of the computation, which engines use too. A single rank computes with copies of the float32 master weights in this
type.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from service.config.learn import ATTENTION, LoraConfig
from service.errors import UserError
from service.learn.model.sharding import shard_rows

A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the names of an adapter's parameters."""


class LoraLinear(nn.Linear):
    """A frozen linear layer to which a trained low-rank update is added."""

    def __init__(self, base: nn.Linear, lora: LoraConfig, dtype: torch.dtype) -> None:
        """`dtype`: data type of A and B. The layer uses the parameters of `base` themselves, not copies."""
        device = base.weight.device
        super().__init__(base.in_features, base.out_features, bias=False, device="meta", dtype=base.weight.dtype)
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Linear(base.in_features, lora.rank, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(lora.rank, base.out_features, bias=False, device=device, dtype=dtype)
        self.scale = lora.alpha / lora.rank
        self.is_on = True
        """Whether the update is added; if not, the output equals that of the base layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Linear layer plus low-rank update: [..., in] -> [..., out]."""
        y = super().forward(x)
        return y + self.scale * self.lora_B(self.lora_A(x)) if self.is_on else y


def add_adapter(model: nn.Module, layers: nn.ModuleList, lora: LoraConfig, dtype: torch.dtype) -> None:
    """Freeze the model, and add an adapter to the target modules of its layers. `dtype`: data type of the adapter.

    Raises:
        UserError: the model lacks a target; or the model has experts, and a target is outside the attention.
    """
    model.requires_grad_(False)
    missing = set(lora.targets)
    for layer in layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if name in lora.targets and isinstance(child, nn.Linear):
                    setattr(parent, name, LoraLinear(child, lora, dtype))
                    missing.discard(name)
    if any(hasattr(layer.mlp, "experts") for layer in layers) and not set(lora.targets) <= set(ATTENTION):
        raise UserError(
            "model.lora.targets: the model has experts, which get no adapter; choose among the attention layers "
            f"[{','.join(ATTENTION)}]"
        )
    if missing:
        raise UserError(f"model.lora.targets: the model has no linear layer {min(missing)}; leave it out")


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Within the block, the model computes without the adapter."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for module in adapted:
        module.is_on = False
    try:
        yield
    finally:
        for module in adapted:
            module.is_on = True


@torch.no_grad()
def begin_adapter(masters: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], seed: int) -> None:
    """Fill this rank's shards with a new adapter that changes nothing yet: B is 0, and A is random, equal for any
    number of ranks."""
    for name, parameter in parameters.items():
        if name.endswith(B):
            masters[name].zero_()
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            bound = parameter.shape[1] ** -0.5  # PEFT's initialisation: Kaiming with a = sqrt(5)
            whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            masters[name].copy_(whole[shard_rows(parameter)])


def merged(weights: Mapping[str, Tensor], adapter: dict[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """Copies of the weights in float32. Where `adapter` has A and B of a weight, the update alpha / rank B A is added,
    and A and B are removed from `adapter`."""
    found = {name: weight.float() for name, weight in weights.items()}
    for name, weight in found.items():
        a, b = (name.removesuffix(".weight") + end for end in (A, B))
        if a in adapter and b in adapter:
            found[name] = weight + lora.alpha / lora.rank * (adapter.pop(b).float() @ adapter.pop(a).float())
    return found
