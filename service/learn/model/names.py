"""Names of weights: those of the model's parameters, and those in a folder.

    in the model    model.layers.0.mlp.experts.gate_up_proj [E, 2 I, H]      ...experts.down_proj [E, H, I]
    in a folder     model.layers.0.mlp.experts.0.gate_proj.weight [I, H], ...0.up_proj.weight [I, H], ...
                    or as in the model, in families whose folders store experts in one weight
    multimodal      model.language_model.layers.0.mlp..., and the weights of other parts of the model

The names of a folder's weights show its form; weights are written in the form of the folder that was loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import Tensor

from service.learn.model.sharding import Rows
from service.model_folder import EMBEDDING

HEAD = "lm_head.weight"
BACKBONE = "model."
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Names(NamedTuple):
    """How a folder names the weights of a model."""

    prefix: str = BACKBONE
    """The folder's prefix in place of the model's prefix `model.`."""
    fused: bool = False
    """True if one stored weight holds all experts of a layer."""

    @classmethod
    def of(cls, stored: Collection[str]) -> Names:
        """The naming of a folder whose stored weights have the names `stored`."""
        last = EMBEDDING.removeprefix(BACKBONE)
        prefixes = [name.removesuffix(last) for name in stored if name.endswith("." + last)]
        fused = any(name.endswith(f".experts.{projection}") for name in stored for projection in PROJECTIONS)
        return cls(min(prefixes, key=len, default=BACKBONE), fused)

    def stored(self, name: str) -> str:
        """The folder's name for the model's weight `name`.

        >>> Names("model.language_model.").stored("model.norm.weight")
        'model.language_model.norm.weight'
        """
        if name.startswith(BACKBONE):
            return self.prefix + name.removeprefix(BACKBONE)
        # older folders have the head inside the language model, too
        return self.prefix.removesuffix(BACKBONE) + name if self.prefix.endswith(f".{BACKBONE}") else name

    def is_other(self, stored: str) -> bool:
        """True if a stored weight belongs to a part of a multimodal model other than the language model."""
        return self.prefix != BACKBONE and not stored.startswith(self.prefix) and not stored.endswith(HEAD)

    def of_expert(self, name: str, expert: int) -> list[str]:
        """The folder's names for one expert's part of the model's weight `name`. Empty if the folder stores the weight
        as a whole.

        >>> Names().of_expert("model.layers.0.mlp.experts.gate_up_proj", 3)
        ['model.layers.0.mlp.experts.3.gate_proj.weight', 'model.layers.0.mlp.experts.3.up_proj.weight']
        """
        path, _, last = self.stored(name).rpartition(".")
        if self.fused or not path.endswith(".experts"):
            return []
        return [f"{path}.{expert}.{projection}.weight" for projection in PROJECTIONS.get(last, ())]

    def split(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A model's weights under the names of the folder. Weights of all experts are split into one weight per expert,
        unless the folder stores them in one weight."""
        whole = {name: Rows(tuple(weight.shape), 0, weight) for name, weight in weights.items()}
        kept = {self.stored(name) for name in weights}
        # safetensors refuses tensors that share memory
        return {name: rows if name in kept else rows.clone() for name, (_, _, rows) in self.split_rows(whole).items()}

    def split_rows(self, weights: Mapping[str, Rows]) -> dict[str, Rows]:
        """As `split`, for the rows that a rank holds. In a weight of all experts each row is one expert, so a rank has
        the complete weights of some experts and no part of the others."""
        split = dict[str, Rows]()
        for name, (shape, first, rows) in weights.items():
            if not self.of_expert(name, 0):
                split[self.stored(name)] = Rows(shape, first, rows)
                continue
            for expert in range(shape[0]):
                names = self.of_expert(name, expert)
                of_shape = (shape[1] // len(names), *shape[2:])
                is_held = first <= expert < first + len(rows)
                values = rows[expert - first] if is_held else rows.new_empty((0, *shape[2:]))
                of_names = values.chunk(len(names)) if is_held else [values] * len(names)
                split |= {part: Rows(of_shape, 0, of_part) for part, of_part in zip(names, of_names, strict=True)}
        return split
