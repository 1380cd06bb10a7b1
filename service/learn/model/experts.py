"""Mixtures of experts: the names of their weights on disk.

in the model    ...mlp.experts.gate_up_proj [E, 2 I, H]       ...mlp.experts.down_proj [E, H, I]
on disk         ...mlp.experts.0.gate_proj.weight [I, H], ...mlp.experts.0.up_proj.weight [I, H], ...
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from service.learn.model.sharding import Rows

PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def names_on_disk(name: str, expert: int) -> list[str]:
    """The weights on disk that make up one expert's part of a fused weight; empty if `name` is not a fused weight.

    >>> names_on_disk("model.layers.0.mlp.experts.gate_up_proj", 3)
    ['model.layers.0.mlp.experts.3.gate_proj.weight', 'model.layers.0.mlp.experts.3.up_proj.weight']
    """
    path, _, last = name.rpartition(".")
    if not path.endswith(".experts"):
        return []
    return [f"{path}.{expert}.{projection}.weight" for projection in PROJECTIONS.get(last, ())]


def split_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split fused weights of experts into one weight per expert and projection, as on disk; other weights are
    unchanged."""
    whole = {name: Rows(tuple(weight.shape), 0, weight) for name, weight in weights.items()}
    # safetensors refuses tensors that share memory
    return {name: rows if name in weights else rows.clone() for name, (_, _, rows) in split_expert_rows(whole).items()}


def split_expert_rows(weights: Mapping[str, Rows]) -> dict[str, Rows]:
    """Same as `split_experts`, for a rank's rows: a fused weight has one row per expert, so a rank has the complete
    weights of some experts and no part of the others."""
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
