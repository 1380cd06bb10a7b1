"""Hugging Face folders: reading this rank's part of the weights, writing whole ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from service.config.model_folder import EMBEDDING, INDEX, SINGLE
from service.errors import UserError
from service.files import atomic_folder, sync
from service.learn.model.experts import names_on_disk

HEAD = "lm_head.weight"

TYPES = ("F64", "F32", "F16", "BF16")
"""Types of stored weights that mean what they say; narrower ones need scales."""

COMPUTED = "rotary_emb.inv_freq"
"""Old folders hold it; every model computes it anew."""

ROWS_AT_ONCE = 4096


class Stored:
    """The weights of a folder, by name; files are opened as they are asked for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._file_of = _files_of(folder)
        self._open: dict[Path, Any] = {}

    def read(self, name: str, rows: slice, into: Tensor, shape: Sequence[int]) -> None:
        """Fill `into` with some rows of a weight that must have this shape."""
        if name not in self._file_of and names_on_disk(name, 0):
            for row, expert in enumerate(range(*rows.indices(shape[0]))):
                parts = names_on_disk(name, expert)
                for part, values in zip(parts, into[row].chunk(len(parts)), strict=True):
                    values.copy_(self._slice(part, values.shape)[:])
        else:
            into.copy_(self._slice(name, shape)[rows])

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Compare the headers of all files with these weights.

        Raises:
            UserError: a weight is missing, has another shape or type, or is one that nobody asks for.
        """
        asked: set[str] = set()
        for name, shape in shapes.items():
            for part, part_shape in self._parts(name, shape):
                self._slice(part, part_shape)
                asked.add(part)
        unasked = {name for name in self._file_of if not name.endswith(COMPUTED)} - asked
        if HEAD in unasked:
            self._check_tied_head(shapes[EMBEDDING])
        if unasked - {HEAD}:
            raise UserError(
                f"model.path: {self._folder} has a weight {min(unasked - {HEAD})!r}, which its config.json does not "
                f"ask for ({len(unasked - {HEAD})} such weights); the two do not belong together"
            )

    def _parts(self, name: str, shape: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
        """What a weight is on disk: itself, or those of each expert."""
        if name in self._file_of or not names_on_disk(name, 0):
            yield name, shape
            return
        for expert in range(shape[0]):
            parts = names_on_disk(name, expert)
            yield from ((part, (shape[1] // len(parts), *shape[2:])) for part in parts)

    def _check_tied_head(self, shape: Sequence[int]) -> None:
        """Folders may hold the output head of tied embeddings once more, where it must be the same."""
        head, embedding = self._slice(HEAD, shape), self._slice(EMBEDDING, shape)
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
        if file not in self._open:
            self._open[file] = self._stack.enter_context(_opened(file))
        try:
            stored = self._open[file].get_slice(name)
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


@torch.no_grad()
def load_weights(folder: Path, masters: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    """Fill each master with its part of the weights on disk; reads only that part."""
    with ExitStack() as stack:
        stored = Stored(folder, stack)
        stored.check({name: parameter.shape for name, parameter in parameters.items()})
        for name, parameter in parameters.items():
            stored.read(name, _own_part(parameter), masters[name], parameter.shape)


def check_weights(folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Compare a folder's weights with those that its config.json asks for; reads headers, and a tied head.

    Raises:
        UserError: a file is missing, cut short or no safetensors, or the weights are others.
    """
    with ExitStack() as stack:
        Stored(folder, stack).check(shapes)


def _files_of(folder: Path) -> dict[str, Path]:
    if (folder / INDEX).is_file():
        try:
            index = json.loads((folder / INDEX).read_text())
            file_of = {str(name): str(file) for name, file in index["weight_map"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"model.path: {folder / INDEX} is no index of weights: {error!r}") from error
        if outside := [file for file in file_of.values() if Path(file).name != file or file in ("", "..")]:
            raise UserError(f"model.path: {folder / INDEX} names {outside[0]!r}, which does not lie in the folder")
        return {name: folder / file for name, file in file_of.items()}
    if not (folder / SINGLE).is_file():
        raise UserError(f"model.path: {folder} has neither {SINGLE} nor {INDEX}; weights must be safetensors")
    with _opened(folder / SINGLE) as weights:
        return dict.fromkeys(weights.keys(), folder / SINGLE)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"model.path: the weights {file} cannot be read: {error}") from error


def _own_part(parameter: nn.Parameter) -> slice:
    """The rows of a parameter that this rank holds: all, or its chunk of dimension 0 as FSDP2 cuts it."""
    if not isinstance(parameter, DTensor):
        return slice(None)
    if parameter.placements != (Shard(0),):
        raise ValueError(f"unexpected placements {parameter.placements}")
    mesh = parameter.device_mesh
    return slice(*chunk(parameter.shape[0], mesh.get_local_rank(), mesh.size()))


def chunk(length: int, rank: int, world: int) -> tuple[int, int]:
    """The rows of a dimension 0 of this length that a rank holds; FSDP2 cuts like this."""
    size = -(-length // world)
    start = min(rank * size, length)
    return start, min(start + size, length)


def write_folder(folder: Path, source: Path, weights: dict[str, Tensor]) -> None:
    """Write a Hugging Face folder: the weights, and all that `source` holds beside weights; whole or not at all."""
    with atomic_folder(folder) as partial:
        for file in sorted(source.iterdir()):
            if _is_beside_weights(file):
                shutil.copy2(file, partial / file.name)
        save_torch_state_dict(weights, partial, metadata={"format": "pt"})
        _write_dtype(partial / "config.json", next(iter(weights.values())).dtype)
        for file in partial.iterdir():
            # safetensors creates files that only their owner may read
            shutil.copymode(partial / "config.json", file)
            sync(file)


def _is_beside_weights(file: Path) -> bool:
    return file.is_file() and not file.name.startswith("model") and file.suffix not in (".bin", ".safetensors", ".pt")


def _write_dtype(file: Path, dtype: torch.dtype) -> None:
    config = json.loads(file.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
