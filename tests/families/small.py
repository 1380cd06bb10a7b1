"""Makes a small model of any family: the family's own configuration with few layers, heads and experts."""

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from service.learn.model.hf_config import text_config

WINDOW = 7
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_attention_heads": 4,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
}
"""Dimensions of a small model; dimensions that a family does not have are skipped."""

TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")

BY_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
"""Names of the settings that have one entry per layer."""


def small_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """The configuration of a small model of a family: the family's defaults with these changes, reduced by `shrunk`.

    Raises:
        ValueError: the installed transformers does not have the family.
    """
    return shrunk(text_config(AutoConfig.for_model(model_type, **changes)))


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration reduced to a small model, which has a layer of each kind that the given model has."""
    given = config.to_dict()
    values = {name: value for name, value in given.items() if name not in TOKENS}
    values |= {name: size for name, size in SMALL.items() if given.get(name) or (name == "head_dim" and name in given)}
    heads, kv_heads = given["num_attention_heads"], given.get("num_key_value_heads")
    if kv_heads is not None:
        values["num_key_value_heads"] = 4 if kv_heads == heads else 2
    if given.get("sliding_window"):
        values["sliding_window"] = WINDOW
    if given.get("first_k_dense_replace"):
        values["first_k_dense_replace"] = 1
    layers = _layers(given)
    values["num_hidden_layers"] = layers
    for name in BY_LAYER:
        if given.get(name):
            values[name] = given[name][:layers]
    if given.get("mlp_only_layers"):
        values["mlp_only_layers"] = [layer for layer in given["mlp_only_layers"] if layer < layers]
    return type(config)(**(values | dict.fromkeys(TOKENS) | {"initializer_range": 0.2}))


def _layers(given: dict[str, list[Any]]) -> int:
    """Number of first layers that include at least one layer of each kind; at least 2."""
    kinds = [given[name] for name in BY_LAYER if given.get(name)]
    return max([2, *(of_layers.index(kind) + 1 for of_layers in kinds for kind in set(of_layers))])
