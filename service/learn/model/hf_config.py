"""Reads the `config.json` of a Hugging Face folder, and refuses models for which the packed forward pass is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from service.config.model_folder import MODEL_CONFIG, model_config, refuse_remote_code, require_files, unsupported
from service.errors import UserError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Position embeddings that do not depend on the row or micro-batch of a token."""

MAX_SHAPE = {
    "num_hidden_layers": 256,
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "shared_expert_intermediate_size": 1 << 20,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "num_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
}
"""Largest allowed dimensions, above those of published models: larger ones overflow, or take many minutes."""

POSITIVE = ("rms_norm_eps", "rope_theta")
"""Settings that must be positive, because a model divides by them."""

ACTIVATION = "silu"
"""The only activation that vLLM supports in the MLPs of the supported families; all their published models have it."""

MAX_CHARACTERS = 200
"""Maximum characters of an error message of transformers."""


def read_config(folder: Path) -> PretrainedConfig:
    """Read the model's configuration.

    Raises:
        UserError: the file is missing or malformed, refers to custom code, or describes a model that is not supported.
    """
    require_files(folder, MODEL_CONFIG)
    refuse_remote_code(folder)
    if problem := _impossible(model_config(folder)):
        raise UserError(f"model.path: {folder / MODEL_CONFIG} describes no model: {problem}")
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # what transformers raises depends on which of its assumptions about the file is broken
        told = " ".join(str(error).split())[:MAX_CHARACTERS]
        raise UserError(f"model.path: {folder / MODEL_CONFIG} describes no model: {told}") from error
    reason = _unsupported(config)
    if reason:
        raise UserError(f"model.path: {folder} cannot be trained: {reason}")
    return config


@contextmanager
def code_of_the_model(folder: Path) -> Iterator[None]:
    """Within the block, turn errors of the model's modules, such as for impossible dimensions, into a `UserError`.

    Raises:
        UserError: the modules raised an error; the message names `config.json` and the error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # no complete list exists of what transformers and torch raise for odd numbers
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"model.path: {folder / MODEL_CONFIG} describes a model that cannot be made or run: "
            f"{type(error).__name__}: {first}"
        ) from error


def _impossible(settings: Mapping[str, Any]) -> str | None:
    """The shape setting with an impossible number; None if all are possible."""
    for name, most in MAX_SHAPE.items():
        value = settings.get(name)  # transformers has a default for missing values and null
        if value is not None and not (type(value) is int and 1 <= value <= most):
            return f"{name} is {value!r:.40}; it must be a whole number from 1 to {most}"
    rope = settings.get("rope_parameters")
    given = {**settings, **(rope if isinstance(rope, Mapping) else {})}
    for name in POSITIVE:
        value = given.get(name)
        if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
            return f"{name} is {value!r:.40}; it must be a number above 0"
    experts, chosen = settings.get("num_experts"), settings.get("num_experts_per_tok")
    if experts is not None and chosen is not None and chosen > experts:
        return f"num_experts_per_tok is {chosen}, more than num_experts, {experts}"
    return None


def _unsupported(config: PretrainedConfig) -> str | None:
    """Return why a model of this configuration cannot be trained; None if it can."""
    if reason := unsupported(config.model_type, getattr(config, "quantization_config", None)):
        return reason
    if config.hidden_act != ACTIVATION:
        return f"its activation is {config.hidden_act!r:.40} (hidden_act); engines compute {ACTIVATION} only"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        return f"its {heads} attention heads (num_attention_heads) are no multiple of num_key_value_heads, {kv_heads}"
    if getattr(config, "head_dim", None) is None and config.hidden_size % heads:
        return f"its hidden_size {config.hidden_size} is no multiple of num_attention_heads, {heads}"
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
