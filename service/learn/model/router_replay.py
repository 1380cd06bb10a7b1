"""Router replay: a mixture of experts trains with the experts that the sampler chose for each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from service.handoff.steps.limits import Routing


def routing_of_model(config: PretrainedConfig) -> Routing:
    """The routed experts that a model of this configuration can replay: layers, experts per token, experts per
    layer."""
    experts, n_layers = getattr(config, "num_experts", 0) or 0, config.num_hidden_layers
    if not experts:
        return Routing((), 0, 0)
    dense, every = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    with_experts = [n for n in range(n_layers) if n not in dense and (n + 1) % every == 0]
    return Routing((n_layers, len(with_experts)), config.num_experts_per_tok, experts)


class RouterReplay:
    """Makes routers use the experts that were recorded for each token; where -1 is recorded, the router chooses.

    The weights of the chosen experts still come from the trained router, so gradients reach it.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        found: dict[int, Any] = {number: getattr(layer.mlp, "gate", None) for number, layer in enumerate(layers)}
        self._routers = {number: router for number, router in found.items() if hasattr(router, "top_k")}
        self._n_layers = len(layers)
        self._recorded: dict[Any, Tensor] = {}
        for router in self._routers.values():
            router.register_forward_hook(self._choose)

    def set(self, experts_NLK: Tensor | None) -> None:
        """Set the experts for the next forward pass, for all layers or only for those with experts; None: no replay."""
        self._recorded.clear()
        if experts_NLK is None:
            return
        n_layers = experts_NLK.shape[1]
        if n_layers not in (self._n_layers, len(self._routers)):
            raise ValueError(
                f"routed experts of {n_layers} layers do not fit a model with {len(self._routers)} "
                f"expert layers among {self._n_layers}"
            )
        for position, (number, router) in enumerate(self._routers.items()):
            self._recorded[router] = experts_NLK[:, number if n_layers == self._n_layers else position]

    def _choose(self, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        recorded_NK = self._recorded.get(router)
        if recorded_NK is None:
            return output
        logits, _, native_NK = output
        recorded_N = (recorded_NK >= 0).all(-1, keepdim=True)
        chosen_NK = torch.where(recorded_N, recorded_NK, native_NK)
        weights_NK = logits.softmax(-1, dtype=torch.float).gather(1, chosen_NK)
        if router.norm_topk_prob:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        return logits, weights_NK.to(logits.dtype), chosen_NK
