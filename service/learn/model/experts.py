"""Chooses the kernels of experts: fused kernels where they are installed and correct, else grouped matrix products.

Grouped matrix products write three intermediate results to memory: the gathered tokens of all experts, both halves of
the gate, and the weighted outputs. The fused kernels (SonicMoE) compute all this in a few passes. transformers calls
the fused kernels if the package `kernels` provides them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe
from transformers.integrations.sonicmoe import ACT_MAP, is_sonicmoe_loadable

log = logging.getLogger(__name__)

FUSED, GROUPED = "sonicmoe", "grouped_mm"
TOKENS, EXPERTS, TOPK = 256, 8, 2
"""Size of the trial of fused kernels: tokens, experts, and experts per token."""
TOLERANCE = 0.02
"""Largest accepted relative difference between the results of two bfloat16 kernels; one rounding changes 0.4 %."""


def use_fastest_experts(layers: Iterable[Any], device: torch.device, compute: torch.dtype) -> str | None:
    """Choose the kernels that compute the experts of all layers, set them in the model, and log their name. Returns the
    name; None if the layers have no experts or do not compute in bfloat16.

    Fused kernels are first tried on a few random experts of the model's shape: their output and gradients must equal
    the results of grouped matrix products up to rounding.
    """
    experts = [layer.mlp.experts for layer in layers if hasattr(getattr(layer, "mlp", None), "experts")]
    if not experts or compute != torch.bfloat16:
        return None
    if why := _unusable(experts[0], device):
        log.info("experts are computed by grouped products, not by fused kernels: %s", why)
        return GROUPED
    for module in experts:
        module.config._experts_implementation = FUSED
    log.info("experts are computed by the fused kernels of SonicMoE")
    return FUSED


def _unusable(experts: Any, device: torch.device) -> str | None:
    """Why fused kernels cannot compute these experts; None if they can."""
    if getattr(type(experts), "_apply_gate", None) is not moe._default_apply_gate or not experts.has_gate:
        return f"{type(experts).__name__} has a gate of its own"
    if getattr(experts.config, "hidden_act", "") not in ACT_MAP:
        return f"they have no activation {getattr(experts.config, 'hidden_act', None)}"
    try:
        is_sonicmoe_loadable(raise_error=True)
        difference = _difference(experts, device)
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises, training is possible without it
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return None if difference <= TOLERANCE else f"they differ from grouped products by {difference:.1e}"


@torch.enable_grad()
def _difference(experts: Any, device: torch.device) -> float:
    """Largest relative difference of output and gradients between fused kernels and grouped matrix products, for a few
    random experts."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device) * scale
        return values.to(torch.bfloat16).requires_grad_()

    weights = {name: drawn(EXPERTS, *p.shape[1:], scale=0.02) for name, p in experts.named_parameters()}
    described = ("config", "act_fn", "has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
    small = SimpleNamespace(num_experts=EXPERTS, _is_expert_parallel=False, **weights)
    for name in described:
        setattr(small, name, getattr(experts, name))
    hidden_ND, scores_NE = drawn(TOKENS, experts.config.hidden_size), drawn(TOKENS, EXPERTS)
    weight_NK, chosen_NK = scores_NE.softmax(-1).topk(TOPK)

    def computed(forward: Callable[..., Tensor]) -> list[Tensor]:
        out_ND = forward(small, hidden_ND, chosen_NK, weight_NK)
        inputs = (hidden_ND, scores_NE, *weights.values())
        return [out_ND.detach(), *torch.autograd.grad(out_ND.float().square().sum(), inputs, retain_graph=True)]

    pairs = zip(*(computed(moe.ALL_EXPERTS_FUNCTIONS[name]) for name in (FUSED, GROUPED)), strict=True)
    return max(float((ours.float() - other.float()).norm() / other.float().norm()) for ours, other in pairs)
