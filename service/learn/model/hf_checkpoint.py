"""Reads and writes the weights of Hugging Face folders, and compares their names and shapes with those of a model. A
rank reads only the rows of its shard."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor

from service.errors import UserError
from service.files import atomic_folder, sync
from service.learn.model.names import HEAD, Names
from service.learn.model.sharding import shard_rows
from service.model_folder import EMBEDDING, INDEX, MODEL_CONFIG, SINGLE, open_weights, weight_index

TYPES = ("F64", "F32", "F16", "BF16")
"""Types of stored weights that can be loaded for training. Narrower types are refused, because they would need
scales."""

COMPUTED = "rotary_emb.inv_freq"
"""Name of a buffer that old folders contain; every model computes this buffer, so it is not read."""

ROWS_AT_ONCE = 4096


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
                    "(tie_word_embeddings); set false there if the head is one of its own"
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
        if file.is_file() and not file.name.startswith("model") and file.suffix not in (".bin", ".safetensors", ".pt"):
            shutil.copy2(file, folder / file.name)
    settings = folder / MODEL_CONFIG
    config = json.loads(settings.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    settings.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for file in folder.iterdir():
        # safetensors creates files that only their owner may read
        shutil.copymode(settings, file)
        sync(file)
