"""Mixtures of experts: the names of their weights on disk, and replay of the routing that the sampler recorded.

in the model    ...mlp.experts.gate_up_proj [E, 2 I, H]       ...mlp.experts.down_proj [E, H, I]
on disk         ...mlp.experts.0.gate_proj.weight [I, H], ...mlp.experts.0.up_proj.weight [I, H], ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from service.handoff.steps.limits import Routing
from service.learn.model.sharding import Rows

PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def names_on_disk(name: str, expert: int) -> list[str]:
    """The weights on disk that one expert's part of a fused weight consists of; none if `name` is not a fused weight.

    >>> names_on_disk("model.layers.0.mlp.experts.gate_up_proj", 3)
    ['model.layers.0.mlp.experts.3.gate_proj.weight', 'model.layers.0.mlp.experts.3.up_proj.weight']
    """
    path, _, last = name.rpartition(".")
    if not path.endswith(".experts"):
        return []
    return [f"{path}.{expert}.{projection}.weight" for projection in PROJECTIONS.get(last, ())]


def split_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fused weights of experts as one weight an expert and projection, as on disk; all others unchanged."""
    return dict(pair for name, weight in weights.items() for pair in _split(name, weight))


def _split(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not names_on_disk(name, 0):
        yield name, weight
        return
    for expert, of_expert in enumerate(weight):
        names = names_on_disk(name, expert)
        for part, values in zip(names, of_expert.chunk(len(names)), strict=True):
            # safetensors refuses tensors that share memory
            yield part, values.clone()


def split_expert_rows(weights: Mapping[str, Rows]) -> dict[str, Rows]:
    """As `split_experts`, of a rank's rows: a fused weight has a row an expert, so a rank has the whole weights on disk
    of its experts and nothing of the others."""
    split = dict[str, Rows]()
    for name, (shape, first, rows) in weights.items():
        if not names_on_disk(name, 0):
            split[name] = Rows(shape, first, rows)
            continue
        for expert in range(shape[0]):
            names = names_on_disk(name, expert)
            of_shape = (shape[1] // len(names), *shape[2:])
            is_held = first <= expert < first + len(rows)
            values = rows[expert - first] if is_held else rows.new_empty((0, *shape[2:]))
            of_names = values.chunk(len(names)) if is_held else [values] * len(names)
            split |= {part: Rows(of_shape, 0, of_part) for part, of_part in zip(names, of_names, strict=True)}
    return split


def routing_of_model(config: PretrainedConfig) -> Routing:
    """The routed experts that a model of this configuration can replay: layers, experts a token, experts a layer."""
    experts, n_layers = getattr(config, "num_experts", 0) or 0, config.num_hidden_layers
    if not experts:
        return Routing((), 0, 0)
    dense, every = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    with_experts = [n for n in range(n_layers) if n not in dense and (n + 1) % every == 0]
    return Routing((n_layers, len(with_experts)), config.num_experts_per_tok, experts)


class RouterReplay:
    """Makes routers choose the experts that were recorded for a token; for -1 the router chooses.

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
        """Set the experts for the next forward pass, of all layers or of those with experts; None: no replay."""
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
