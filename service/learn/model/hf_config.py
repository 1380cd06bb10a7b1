"""Reads the `config.json` of a Hugging Face folder, and refuses models for which the packed forward pass is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from service.errors import UserError
from service.model_folder import (
    MODEL_CONFIG,
    model_config,
    near_family,
    refuse_remote_code,
    require_files,
    text_part,
    transformers_of,
    unsupported,
)

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Supported kinds of position embeddings: a token's embedding does not depend on its row or micro-batch."""

MAX_SHAPE = {
    **dict.fromkeys(("num_hidden_layers", "decoder_sparse_step"), 256),
    "vocab_size": 1 << 22,
    **dict.fromkeys(("hidden_size", "intermediate_size"), 1 << 20),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 1 << 20),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 1 << 14),
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), 1 << 14),
    **{f"linear_{name}": 1 << 14 for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")},
    "linear_conv_kernel_dim": 1 << 14,
}
"""Largest allowed dimensions of a model, larger than in any published model. Beyond them, sizes overflow or the model
takes many minutes to build."""

ACTIVATIONS = ("hidden_act", "hidden_activation")
"""Names of the settings of the MLP's activation. Engines compute only the activation that all published models of a
family have."""

REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention", "output_router_logits")
"""Settings that change the attention, the logits or the loss in a way that packed rows or the chunked output head do
not compute."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "linear_attention"})

POSITIVE = ("rms_norm_eps", "rope_theta")
"""Settings that must be positive, because a model divides by them."""

MAX_CHARACTERS = 200
"""Length to which an error message of transformers is shortened, in characters."""


def read_config(folder: Path, proven: bool = True) -> PretrainedConfig:
    """Read the model's configuration; for a multimodal model, the part for its language model.

    `proven`: whether to refuse quantised models, and families whose training was not compared with their own code.

    Raises:
        UserError: the file is missing or malformed, refers to custom code, or describes a model that is not supported.
    """
    require_files(folder, MODEL_CONFIG)
    refuse_remote_code(folder)
    settings = model_config(folder)
    if problem := _impossible(text_part(settings)):
        raise UserError(f"model.path: {folder / MODEL_CONFIG} describes no model: {problem}")
    if proven and (reason := unsupported(settings)):
        raise UserError(f"model.path: {folder} cannot be trained: {reason}")
    try:
        config = text_config(AutoConfig.from_pretrained(folder))
    except Exception as error:  # what transformers raises depends on which of its assumptions about the file is broken
        told = shorten(str(error), MAX_CHARACTERS, placeholder=" ...")
        near = near_family(str(settings.get("model_type")))
        raise UserError(
            f"model.path: {folder / MODEL_CONFIG} describes no model: {told}; {transformers_of(settings)}"
            + (f"; the nearest family is {near}" if near else "")
        ) from error
    if reason := _unsupported(config):
        raise UserError(f"model.path: {folder} cannot be trained: {reason}")
    return config


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the language model: a part of a multimodal model's configuration, otherwise all of
    `config`."""
    text: PretrainedConfig = config.get_text_config()
    if text is not config:
        text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
    return text


def logit_scale(config: PretrainedConfig) -> float:
    """The factor by which models of the family multiply their logits; 1 for most families."""
    return getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)


def unread_weights(config: PretrainedConfig) -> list[str]:
    """Name patterns of weights that folders of the family may contain but the trained model does not use, such as
    weights that predict several tokens at once."""
    family = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return list(family._keys_to_ignore_on_load_unexpected or ())


@contextmanager
def code_of_the_model(folder: Path) -> Iterator[None]:
    """Within the block, turn errors of the model's own code, such as for impossible dimensions, into a `UserError`.

    Raises:
        UserError: the model's code raised an error; the message names `config.json` and the error.
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
    """A message about the first setting with an impossible number; None if there is no such setting."""
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
    usual = type(config)()
    for name in ACTIVATIONS:
        if (given := getattr(config, name, None)) != (computed := getattr(usual, name, None)):
            only = f"engines compute {computed} only" if computed else "its family has no such setting"
            return f"its activation is {given!r:.40} ({name}); {only}"
    for name in REFUSED:
        if getattr(config, name, None):
            return f"its configuration sets {name}, which is not computed"
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads  # None: as many as query heads
    if heads % kv_heads:
        return f"its {heads} attention heads (num_attention_heads) are no multiple of num_key_value_heads, {kv_heads}"
    if getattr(config, "head_dim", None) is None and config.hidden_size % heads:
        return f"its hidden_size {config.hidden_size} is no multiple of num_attention_heads, {heads}"
    unknown = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if unknown:
        return f"it has {', '.join(sorted(unknown))} layers; supported are {', '.join(sorted(LAYER_TYPES))}"
    window = getattr(config, "sliding_window", None)
    if window is not None and not (type(window) is int and window >= 0):
        return f"its sliding_window is {window!r:.40}; it must be a whole number"
    rope = getattr(config, "rope_parameters", None) or {}
    of_kinds = [of_kind for of_kind in rope.values() if isinstance(of_kind, Mapping)] or [rope]
    for rope_type in {of_kind.get("rope_type", "default") for of_kind in of_kinds}:
        if rope_type not in ROPE_TYPES:
            # dynamic and longrope pick frequencies by the longest row of a forward pass
            return f"its RoPE is of type {rope_type!r}; supported are {', '.join(ROPE_TYPES)}"
    return None
