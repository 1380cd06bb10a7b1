"""The `config.json` of a Hugging Face folder: read, and refused where the packed forward pass would be wrong."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from service.config.model_folder import MODEL_CONFIG, refuse_remote_code, require_files, unsupported
from service.errors import UserError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Position embeddings that are the same for a token whatever row or micro-batch it lies in."""


def read_config(folder: Path) -> PretrainedConfig:
    """The model's configuration.

    Raises:
        UserError: there is none, it is malformed, names code of its own, or describes a model that is not supported.
    """
    require_files(folder, MODEL_CONFIG)
    refuse_remote_code(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, StrictDataclassError) as error:
        # What transformers raises depends on which of its assumptions about the file is broken.
        first = str(error).strip().partition("\n")[0]
        raise UserError(f"model.path: {folder / MODEL_CONFIG} describes no model: {first}") from error
    reason = _unsupported(config)
    if reason:
        raise UserError(f"model.path: {folder} cannot be trained: {reason}")
    return config


def _unsupported(config: PretrainedConfig) -> str | None:
    """Why a model of this configuration cannot be trained; None if it can."""
    if reason := unsupported(config.model_type, getattr(config, "quantization_config", None)):
        return reason
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
