"""The `config.json` of a Hugging Face folder: read, and refused where the packed forward pass would be wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from service.config.model_folder import FAMILIES
from service.errors import UserError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Position embeddings that are the same for a token whatever row or micro-batch it lies in."""


def read_config(folder: Path) -> PretrainedConfig:
    """The model's configuration.

    Raises:
        UserError: there is none, it is malformed, names code of its own, or describes a model that is not supported.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path: {folder} has no config.json; point it at a Hugging Face model folder")
    refuse_remote_code(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, StrictDataclassError) as error:
        # What transformers raises depends on which of its assumptions about the file is broken.
        first = str(error).strip().partition("\n")[0]
        raise UserError(f"model.path: {folder / 'config.json'} describes no model: {first}") from error
    reason = _unsupported(config)
    if reason:
        raise UserError(f"model.path: {folder} cannot be trained: {reason}")
    return config


def refuse_remote_code(folder: Path) -> None:
    """Raises `UserError` where a model folder names code of its own, which transformers or vLLM might then run."""
    for file in sorted(folder.glob("*config*.json")):
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            continue  # the reader of the file reports what is wrong with it
        if _has_key(settings, "auto_map"):
            raise UserError(f"model.path: {file} names code of its own (auto_map), which is not run; remove that entry")


def _has_key(value: object, key: str) -> bool:
    """Whether a mapping has the key, at any depth."""
    if isinstance(value, Mapping):
        return key in value or any(_has_key(inner, key) for inner in value.values())
    return isinstance(value, list) and any(_has_key(inner, key) for inner in value)


def _unsupported(config: PretrainedConfig) -> str | None:
    """Why a model of this configuration cannot be trained; None if it can."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    if getattr(config, "quantization_config", None):
        return "its weights are quantised (quantization_config); name the folder that it was quantised from"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if layer_types - {"full_attention"}:
        return f"it has {', '.join(sorted(layer_types - {'full_attention'}))} layers; only full attention is supported"
    # not every family has layer types, and an engine reads the window by itself
    if getattr(config, "sliding_window", None):
        return (
            f"it attends in a sliding window (sliding_window {config.sliding_window}); only full attention is supported"
        )
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        # dynamic and longrope pick frequencies by the longest row of a forward pass
        return f"its RoPE is of type {rope_type!r}; supported are {', '.join(ROPE_TYPES)}"
    return None
