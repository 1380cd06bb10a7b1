"""Hugging Face folders: reading this rank's part of the weights, writing whole ones."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from service.errors import UserError
from service.learn.experts import names_on_disk

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


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

    def _slice(self, name: str, shape: Sequence[int]) -> Any:
        file = self._file_of.get(name)
        if file is None:
            raise UserError(f"model.path: {self._folder} has no weight {name!r}, which its config.json asks for")
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        stored = self._open[file].get_slice(name)
        found, wanted = tuple(stored.get_shape()), tuple(shape)
        if found != wanted:
            raise UserError(f"model.path: {name} in {file} has shape {found}, config.json asks for {wanted}")
        return stored


@torch.no_grad()
def load_weights(folder: Path, masters: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    """Fill each master with its part of the weights on disk; reads only that part."""
    with ExitStack() as stack:
        stored = Stored(folder, stack)
        for name, parameter in parameters.items():
            stored.read(name, _own_part(parameter), masters[name], parameter.shape)


def _files_of(folder: Path) -> dict[str, Path]:
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
        return {name: folder / file for name, file in index["weight_map"].items()}
    if not (folder / SINGLE).is_file():
        raise UserError(f"model.path: {folder} has neither {SINGLE} nor {INDEX}; weights must be safetensors")
    with safe_open(folder / SINGLE, framework="pt") as weights:
        return dict.fromkeys(weights.keys(), folder / SINGLE)


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
    folder.parent.mkdir(parents=True, exist_ok=True)
    making, old = (folder.with_name(f".{folder.name}.{part}-{os.getpid()}") for part in ("making", "old"))
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.startswith("model") and file.suffix not in (".bin", ".safetensors", ".pt"):
            shutil.copy2(file, making / file.name)
    save_torch_state_dict(weights, making, metadata={"format": "pt"})
    _write_dtype(making / "config.json", next(iter(weights.values())).dtype)
    for file in making.iterdir():
        # safetensors creates files that only their owner may read
        shutil.copymode(making / "config.json", file)
        sync(file)
    sync(making)
    if folder.exists():
        os.replace(folder, old)
    os.replace(making, folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_dtype(file: Path, dtype: torch.dtype) -> None:
    config = json.loads(file.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
