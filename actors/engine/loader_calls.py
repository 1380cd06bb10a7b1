"""Records the calls of vLLM's weight loaders in one update, and repeats them in later updates.

vLLM finds the layer of each tensor, counts the numbers that its loader will copy, and makes a layer's calls when they
are complete. The calls of two updates differ only in the values, which a `PulledTensor` reads when it is copied.
"""

from __future__ import annotations

from inspect import BoundArguments
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from actors.weights.pulled import PulledTensor, WeightFile

LoaderCall = tuple[str, BoundArguments]
"""The name of a layer's parameter, and the arguments of its loader."""


class LayerCalls(list[LoaderCall]):
    """The list in which vLLM keeps the calls of a layer until it has made them."""

    def __init__(self) -> None:
        self.made: list[LoaderCall] = []
        """The calls without their parameters. (The parameters would keep a second model in memory.)"""

    def append(self, call: LoaderCall) -> None:
        """Add a call."""
        super().append(call)
        self.made.append(_copied(call))


class LoaderCalls:
    """The calls of one update."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Begin to record the calls of an update. vLLM must have prepared the model for it."""
        self._file: WeightFile
        self.header = b""
        """The calls can be repeated for weights files with this header."""
        self._values_read = PulledTensor.values_read
        self._of_layers: dict[torch.nn.Module, LayerCalls] = {}
        for layer in model.modules():
            if (info := get_layerwise_info(layer)).can_load():
                self._of_layers[layer] = info.loaded_weights = LayerCalls()

    def finish(self, file: WeightFile) -> None:
        """End the update from this file. The calls can be repeated if they copied every tensor of the file, and no
        other code read values. (Arguments could depend on such values.)"""
        made = (call for calls in self._of_layers.values() for _, call in calls.made)
        given: list[Any] = [each for call in made for each in call.arguments.values() if isinstance(each, torch.Tensor)]
        only_copied = self._values_read == PulledTensor.values_read and {PulledTensor} == {*map(type, given)}
        if only_copied and len({id(each.read_rows) for each in given}) == len(file.stored()):
            self._file, self.header = file, file.header

    def repeat(self, file: WeightFile) -> None:
        """Let vLLM make the calls again, with this file's tensors, when it ends the update. vLLM must have prepared the
        model for the update."""
        self._file.follow(file)
        for layer, calls in self._of_layers.items():
            info = get_layerwise_info(layer)
            info.loaded_weights = [*map(_copied, calls.made)]
            info.load_numel = 0.5 if calls.made else 0  # some of the layer's numbers, but not yet all


def _copied(call: LoaderCall) -> LoaderCall:
    name, bound = call
    return name, BoundArguments(bound.signature, {**bound.arguments, "param": None})
