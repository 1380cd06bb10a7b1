"""The adapter of a policy in training, as trainer and engine name it.

The names are those of PEFT, of a model with a weight `model.layers.0.self_attn.q_proj.weight` of [out, in]:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out, rank]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from service.config import LoraConfig
from service.learn.model.adapter_folder import PREFIX
from service.learn.model.lora import A, B

ADAPTER = "policy"
"""Name of the adapter in the engine."""
ADAPTER_ID = 1
"""Number of the adapter in the engine, under which each publication takes the place of the one before."""

AdapterShapes = dict[str, tuple[int, ...]]
"""The tensors of an adapter: name -> shape."""


def adapter_shapes(lora: LoraConfig, weights: Iterable[tuple[str, Sequence[int]]]) -> AdapterShapes:
    """The tensors of the adapter of a model with weights of these names and shapes."""
    shapes: AdapterShapes = {}
    for name, shape in weights:
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in lora.targets and len(shape) == 2:
            n_out, n_in = shape
            shapes[PREFIX + module + A] = (lora.rank, n_in)
            shapes[PREFIX + module + B] = (n_out, lora.rank)
    return shapes
