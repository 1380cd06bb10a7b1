"""Router replay: a mixture-of-experts model is trained with the experts that the engine chose for each token when
sampling.

The router remains the family's own code, with its rules for scores, groups, biases and weights of experts. Only the
choice of the best experts is replaced. The weights of the recorded experts therefore follow the family's rule, and
gradients reach the router.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from service.columns import unknown
from service.handoff.steps.values import NO_ROUTING, Routing
from service.model_folder import experts_of


def routing_of_model(config: PretrainedConfig, recorded: bool = True) -> Routing:
    """The shape of the experts that engines record for this model: numbers of layers, experts per token, experts per
    layer. `NO_ROUTING` if the model has no experts. `recorded`: whether engines record experts; if not, the result is
    `NO_ROUTING` too."""
    experts, n_layers = experts_of(config), config.num_hidden_layers
    if not experts or not recorded:
        return NO_ROUTING
    dense, every = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    first = getattr(config, "first_k_dense_replace", 0)
    with_experts = [n for n in range(first, n_layers) if n not in dense and (n + 1) % every == 0]
    return Routing((n_layers, len(with_experts)), config.num_experts_per_tok, experts)


class RouterReplay:
    """Makes routers use the experts that were recorded for each token. Where a record is unknown, the router chooses
    the experts."""

    def __init__(self, layers: nn.ModuleList) -> None:
        blocks = {number: getattr(layer, "mlp", None) for number, layer in enumerate(layers)}
        self._blocks: dict[int, Any] = {n: block for n, block in blocks.items() if hasattr(block, "experts")}
        self._n_layers = len(layers)
        self._recorded: dict[int, Tensor] = {}
        for number, block in self._blocks.items():
            # Experts run uncompiled inside a compiled layer: the numbers of their tokens, on which the matrix products
            # depend, change with every batch, and the recorded experts are not an argument of the layer.
            block.forward = torch.compiler.disable(  # type: ignore[no-untyped-call]
                self._replaying(number, block.forward)
            )

    def set(self, experts_NLK: Tensor | None) -> None:
        """Set the recorded experts for the next forward pass. `experts_NLK` has the experts of all layers, or only of
        the layers with experts; None: every router chooses its own experts. Axes: `N` tokens, `L` layers, `K` experts
        per token."""
        self._recorded.clear()
        if experts_NLK is None:
            return
        n_layers = experts_NLK.shape[1]
        if n_layers not in (self._n_layers, len(self._blocks)):
            raise ValueError(
                f"routed experts of {n_layers} layers do not fit a model with {len(self._blocks)} "
                f"expert layers among {self._n_layers}"
            )
        for position, number in enumerate(self._blocks):
            self._recorded[number] = experts_NLK[:, number if n_layers == self._n_layers else position]

    def _replaying(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def replaying(*arguments: Any, **named: Any) -> Any:
            recorded_NK = self._recorded.get(number)
            if recorded_NK is None:
                return forward(*arguments, **named)
            with _Recorded(recorded_NK, self._blocks[number].experts.num_experts) as choice:
                output = forward(*arguments, **named)
            if not choice.is_made:
                raise ValueError(f"the router of layer {number} chooses experts in a way that cannot be replayed")
            return output

        return replaying


class _Recorded(TorchFunctionMode):
    """Within the block, `topk` over all experts returns the recorded experts if it is called for as many experts per
    token as were recorded. Where the record is unknown (`service.columns.unknown`), the choice is the router's own."""

    def __init__(self, recorded_NK: Tensor, experts: int) -> None:
        super().__init__()
        self._recorded_NK, self._experts = recorded_NK, experts
        self.is_made = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        output = function(*arguments, **(named or {}))
        if function not in (torch.topk, Tensor.topk) or arguments[0].shape[-1] != self._experts:
            return output  # routers with groups choose the groups by further calls of `topk`
        if output[1].shape == self._recorded_NK.shape:
            self.is_made = True
            chosen_NK = torch.where(unknown(self._recorded_NK)[..., None], output[1], self._recorded_NK.long())
            return arguments[0].gather(-1, chosen_NK), chosen_NK
        return output
