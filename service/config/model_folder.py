"""What can be known of a Hugging Face folder at once: its JSON files, the headers of its weights, no torch.

`service.run.prepare` looks closer before a run begins: at every weight's shape, and at what transformers makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from service.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types whose packed forward pass is proven equal to the row-by-row one."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"

PLAIN_ROPE = ("default", "llama3")
"""Position embeddings that reach as far as `max_position_embeddings` says."""


def check_model_folder(folder: Path, longest: int) -> None:
    """See whether a model could be trained with turns of up to `longest` tokens, prompt and response together.

    Raises:
        UserError: a file is missing or malformed, the model is none that Baton trains, or is too short.
    """
    for needed in ("config.json", "tokenizer.json"):
        if not (folder / needed).is_file():
            raise UserError(f"model.path: the model folder {folder} has no {needed}; give a Hugging Face folder")
    shape = _json(folder / "config.json")
    _check_shape(shape, folder, longest)
    _check_tokenizer(folder, shape["vocab_size"])
    for file, names in _weights(folder):
        _check_header(file, names, shape["vocab_size"])


def _check_shape(shape: Mapping[str, Any], folder: Path, longest: int) -> None:
    family, size = shape.get("model_type"), shape.get("vocab_size")
    if family not in FAMILIES:
        raise UserError(
            f"model.path: {folder} cannot be trained: model type {family!r:.80} is not one of {', '.join(FAMILIES)}"
        )
    if type(size) is not int:
        raise UserError(f"model.path: {folder / 'config.json'} describes no model: vocab_size is {size!r:.80}")
    if shape.get("quantization_config"):
        raise UserError(
            f"model.path: {folder} cannot be trained: its weights are quantised (quantization_config); name the "
            "folder that it was quantised from"
        )
    rope = shape.get("rope_parameters") or shape.get("rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else "default"
    reach = shape.get("max_position_embeddings")
    if kind in PLAIN_ROPE and type(reach) is int and longest > reach:
        raise UserError(
            f"generator.max_input_length: with max_generate_length it comes to {longest} tokens, but {folder} reaches "
            f"only {reach} (max_position_embeddings in its config.json); lower one of the two"
        )


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        tokens = Tokenizer.from_file(str(file)).get_vocab_size()
    except Exception as error:  # the library raises nothing more special, whatever is wrong with the file
        raise UserError(f"model.path: no tokenizer can be read from {file}: {error}") from error
    if tokens > vocab_size:
        raise UserError(
            f"model.path: the tokenizer in {folder} has {tokens} tokens, its model only {vocab_size}; they do not "
            "belong together"
        )


def _weights(folder: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """The files of the weights, with the names that the index looks for in each; None: there is no index."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise UserError(f"model.path: {folder} has neither {SINGLE} nor {INDEX}; weights must be safetensors")
        yield folder / SINGLE, None
        return
    named = _json(index).get("weight_map")
    if not isinstance(named, Mapping) or not named:
        raise UserError(f"model.path: {index} is no index of weights: it has no weight_map")
    for file in sorted({str(file) for file in named.values()}):
        yield folder / file, {str(name) for name, where in named.items() if where == file}


def _check_header(file: Path, names: set[str] | None, vocab_size: int) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="numpy") as weights:
            held = set(weights.keys())
            rows = weights.get_slice(EMBEDDING).get_shape()[0] if EMBEDDING in held else vocab_size
    except (SafetensorError, OSError) as error:
        raise UserError(f"model.path: the weights {file} cannot be read: {error}") from error
    if names is not None and names - held:
        raise UserError(f"model.path: {file} has no weight {min(names - held)!r}, which {INDEX} looks for there")
    if rows != vocab_size:
        raise UserError(
            f"model.path: {EMBEDDING} in {file} has {rows} rows, config.json asks for {vocab_size} (vocab_size); they "
            "do not belong together"
        )


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"model.path: {file} is no JSON: {error}") from error
    except OSError as error:
        raise UserError(f"model.path: {file} cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise UserError(f"model.path: {file} holds no object")
    return value
