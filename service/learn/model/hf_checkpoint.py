"""Reads and writes the weights of Hugging Face folders, and compares their names and shapes with those of a model. A
rank reads only the rows of its shard.

    in the model    model.layers.0.mlp.experts.gate_up_proj [E, 2 I, H]      ...experts.down_proj [E, H, I]
    in a folder     model.layers.0.mlp.experts.0.gate_proj.weight [I, H], ...0.up_proj.weight [I, H], ...
                    or as in the model, in families whose folders store experts in one weight
    multimodal      model.language_model.layers.0.mlp..., and the weights of other parts of the model

The names of a folder's weights show its form; weights are written in the form of the folder that was loaded.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor

from service.errors import UserError
from service.files import atomic_folder, sync
from service.learn.model.sharding import WeightRows, shard_rows
from service.model_folder import EMBEDDING, INDEX, MODEL_CONFIG, SINGLE, WEIGHTS, open_weights, weight_index

TYPES = ("F64", "F32", "F16", "BF16")
"""Types of stored weights that can be loaded for training. Narrower types are refused, because they would need
scales."""

COMPUTED = "rotary_emb.inv_freq"
"""Name of a buffer that old folders contain; every model computes this buffer, so it is not read."""

ROWS_AT_ONCE = 4096

HEAD = "lm_head.weight"
BACKBONE = "model."
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Names(NamedTuple):
    """How a folder names the weights of a model."""

    prefix: str = BACKBONE
    """The folder's prefix in place of the model's prefix `model.`."""
    fused: bool = False
    """True if one stored weight holds all experts of a layer."""
    others: tuple[str, ...] = ()
    """Names of the other parts of a multimodal model, such as `vision_tower`."""

    @classmethod
    def of(cls, stored: Collection[str]) -> Names:
        """The naming of a folder whose stored weights have the names `stored`."""
        last = EMBEDDING.removeprefix(BACKBONE)
        prefixes = [name.removesuffix(last) for name in stored if name.endswith("." + last)]
        fused = any(name.endswith(f".experts.{projection}") for name in stored for projection in PROJECTIONS)
        names = cls(min(prefixes, key=len, default=BACKBONE), fused)
        others = {name.removeprefix(BACKBONE).partition(".")[0] for name in stored if names.is_other(name)}
        return names._replace(others=tuple(sorted(others)))

    def stored(self, name: str) -> str:
        """The folder's name for the model's weight `name`.

        >>> Names("model.language_model.").stored("model.norm.weight")
        'model.language_model.norm.weight'
        """
        if name.startswith(BACKBONE):
            return self.prefix + name.removeprefix(BACKBONE)
        # older folders have the head inside the language model, too
        return self.prefix.removesuffix(BACKBONE) + name if self.prefix.endswith(f".{BACKBONE}") else name

    def of_model(self, stored: str) -> str:
        """The model's name for a weight of a folder or of transformers' class of a multimodal model.

        >>> Names("language_model.model.").of_model("model.language_model.norm.weight")
        'model.norm.weight'
        """
        prefixes = (self.prefix, "model.language_model.", "language_model.model.")
        found = next((prefix for prefix in prefixes if stored.startswith(prefix)), "")
        return BACKBONE + stored.removeprefix(found) if found else stored

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
        whole = {name: WeightRows(tuple(weight.shape), 0, weight) for name, weight in weights.items()}
        kept = {self.stored(name) for name in weights}
        # safetensors refuses tensors that share memory
        return {name: rows if name in kept else rows.clone() for name, (_, _, rows) in self.split_rows(whole).items()}

    def split_rows(self, weights: Mapping[str, WeightRows]) -> dict[str, WeightRows]:
        """As `split`, for the rows that a rank holds. In a weight of all experts each row is one expert, so a rank has
        the complete weights of some experts and no part of the others."""
        split = dict[str, WeightRows]()
        for name, (shape, first, rows) in weights.items():
            if not self.of_expert(name, 0):
                split[self.stored(name)] = WeightRows(shape, first, rows)
                continue
            for expert in range(shape[0]):
                names = self.of_expert(name, expert)
                of_shape = (shape[1] // len(names), *shape[2:])
                is_held = first <= expert < first + len(rows)
                values = rows[expert - first] if is_held else rows.new_empty((0, *shape[2:]))
                of_names = values.chunk(len(names)) if is_held else [values] * len(names)
                split |= {part: WeightRows(of_shape, 0, of_part) for part, of_part in zip(names, of_names, strict=True)}
        return split


class StoredWeights:
    """The weights stored in a folder, by name. A file is opened when one of its weights is read for the first time."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._file_of = _files_of(folder)
        self.names = Names.of(self._file_of)
        """The names of the folder's weights."""
        self._open: dict[Path, Any] = {}

    def read(self, name: str, rows: slice, into: Tensor, shape: Sequence[int]) -> None:
        """Fill `into` with the given rows of a stored weight. `shape`: the shape that the whole weight must have."""
        if self.names.of_expert(name, 0):
            for row, expert in enumerate(range(*rows.indices(shape[0]))):
                parts = self.names.of_expert(name, expert)
                for part, values in zip(parts, into[row].chunk(len(parts)), strict=True):
                    values.copy_(self._slice(part, values.shape)[:])
        else:
            into.copy_(self._slice(self.names.stored(name), shape)[rows])

    def check(self, shapes: Mapping[str, Sequence[int]], unread: Sequence[str] = ()) -> None:
        """Compare the stored weights, read from the headers of all files, with the names and shapes of a model's
        weights. `unread`: name patterns of further allowed weights.

        Raises:
            UserError: a weight is missing, superfluous, or of another shape or type.
        """
        expected: set[str] = set()
        for name, shape in shapes.items():
            for part, part_shape in self._parts(name, shape):
                self._slice(part, part_shape)
                expected.add(part)
        known = re.compile("|".join([*unread, rf".*{re.escape(COMPUTED)}$"]))
        superfluous = {name for name in self._file_of.keys() - expected if not known.match(name)}
        head = self.names.stored(HEAD)
        if head in superfluous:
            self._check_tied_head(head, shapes[EMBEDDING])
        superfluous = {name for name in superfluous - {head} if not self.names.is_other(name)}
        if superfluous:
            raise UserError(
                f"model.path: {self._folder} has a weight {min(superfluous)!r}, which its config.json does "
                f"not ask for ({len(superfluous)} such weights); the two do not belong together"
            )
        for file, inside in {file: name for name, file in self._file_of.items()}.items():
            again = [name for name in self._opened(inside).keys() if self._file_of.get(name, file) != file]  # noqa: SIM118
            if again:  # engines load all that a file has
                raise UserError(f"model.path: {file} has {again[0]!r}, which {INDEX} expects elsewhere; remove one")

    def others(self, written: Collection[str]) -> dict[str, Tensor]:
        """The stored weights whose names are not in `written`, such as untrained weights and other parts of a
        multimodal model. Left out are tensors that every model computes itself (`COMPUTED`), and the output head."""
        head = self.names.stored(HEAD)
        others = [name for name in self._file_of if name not in written and not name.endswith(COMPUTED)]
        return {name: self._opened(name).get_tensor(name) for name in others if name != head}

    def _parts(self, name: str, shape: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
        """Names and shapes of a weight on disk: of the weight itself, or of one weight per expert and projection."""
        if not self.names.of_expert(name, 0):
            yield self.names.stored(name), shape
            return
        for expert in range(shape[0]):
            parts = self.names.of_expert(name, expert)
            yield from ((part, (shape[1] // len(parts), *shape[2:])) for part in parts)

    def _check_tied_head(self, name: str, shape: Sequence[int]) -> None:
        """Check the output head of tied embeddings if the folder stores it: it must equal the embedding."""
        head, embedding = self._slice(name, shape), self._slice(self.names.stored(EMBEDDING), shape)
        for start in range(0, shape[0], ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            if not torch.equal(head[rows], embedding[rows]):
                raise UserError(
                    f"model.path: {HEAD} in {self._folder} differs from {EMBEDDING}, but its config.json ties them "
                    "(tie_word_embeddings); set it to false if the head has weights of its own"
                )

    def _slice(self, name: str, shape: Sequence[int]) -> Any:
        file = self._file_of.get(name)
        if file is None:
            raise UserError(f"model.path: {self._folder} has no weight {name!r}, which its config.json asks for")
        try:
            stored = self._opened(name).get_slice(name)
        except SafetensorError as error:
            raise UserError(f"model.path: {file} has no weight {name!r}, which {INDEX} looks for there") from error
        found, wanted = tuple(stored.get_shape()), tuple(shape)
        if found != wanted:
            raise UserError(f"model.path: {name} in {file} has shape {found}, config.json asks for {wanted}")
        if stored.get_dtype() not in TYPES:
            raise UserError(
                f"model.path: {name} in {file} is of type {stored.get_dtype()}, which cannot be trained; "
                "name the folder that it was quantised from"
            )
        return stored

    def _opened(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(open_weights(file, "pt"))
        return self._open[file]


@torch.no_grad()
def load_weights(
    folder: Path, masters: Mapping[str, Tensor], parameters: Mapping[str, Tensor], unread: Sequence[str] = ()
) -> None:
    """Fill each master weight with this rank's shard of the stored weight; only the shard is read. `unread`: name
    patterns of further allowed weights."""
    with ExitStack() as stack:
        stored = StoredWeights(folder, stack)
        stored.check({name: parameter.shape for name, parameter in parameters.items()}, unread)
        for name, parameter in parameters.items():
            stored.read(name, shard_rows(parameter), masters[name], parameter.shape)


def stored_names(folder: Path) -> Names:
    """The way in which a folder names its weights; the default names if the folder has no weights yet."""
    return Names.of(_files_of(folder)) if (folder / SINGLE).is_file() or (folder / INDEX).is_file() else Names()


def check_weights(folder: Path, shapes: Mapping[str, Sequence[int]], unread: Sequence[str] = ()) -> None:
    """Check that a folder's weights have the names and shapes of a model's weights. Only the headers of the files are
    read; if the output head is tied but stored, it is read too. `unread`: name patterns of further allowed weights.

    Raises:
        UserError: a file is missing, truncated or not in safetensors format, or the weights differ from the shapes.
    """
    with ExitStack() as stack:
        StoredWeights(folder, stack).check(shapes, unread)


def _files_of(folder: Path) -> dict[str, Path]:
    if index := weight_index(folder):
        return index
    with open_weights(folder / SINGLE, "pt") as weights:
        return dict.fromkeys(weights.keys(), folder / SINGLE)


def write_folder(folder: Path, source: Path, weights: dict[str, Tensor]) -> None:
    """Write a Hugging Face folder with these weights, named as in the folder `source`, and with all other weights and
    files of `source`; the folder appears only once it is complete."""
    with atomic_folder(folder) as partial, ExitStack() as stack:
        weights = weights | StoredWeights(source, stack).others(weights.keys())
        save_torch_state_dict(weights, partial, metadata={"format": "pt"})
        write_beside_weights(source, partial, next(iter(weights.values())).dtype)


def write_beside_weights(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy all files of a Hugging Face folder except its weights; set `dtype` in the copied config, and sync all files
    to disk."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.startswith("model") and file.suffix not in WEIGHTS:
            shutil.copy2(file, folder / file.name)
    settings = folder / MODEL_CONFIG
    config = json.loads(settings.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    settings.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for file in folder.iterdir():
        # safetensors creates files that only their owner may read
        shutil.copymode(settings, file)
        sync(file)
