"""Whether the GPUs of an engine can divide a model, and the bytes of the engine's KV cache, from the numbers in the
model's config.json (or in one that a run will make). Does not import torch, which takes seconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from service.config.rollout import EnvConfig, GeneratorConfig
from service.config.tree import MakeModelConfig
from service.errors import UserError
from service.rollout.chat.tokenizer import words_of
from service.rollout.environments.registry import synthetic_data

BLOCK_TOKENS = 32
"""Tokens per block of the KV cache on CPU; vLLM's default is 128, with which short conversations would rarely share
blocks."""

VOCABULARY_ROWS = 64
"""Engines pad the rows of embedding and output head to a multiple of this number."""

DIVIDED = ("num_attention_heads", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Dimensions of a model that are divided equally among the GPUs of an engine."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def kv_token_bytes(model: Any, generator: GeneratorConfig, dtype: str) -> int:
    """Bytes of one token's keys and values on one GPU of an engine, for the layers and key heads (at least one) that
    this GPU computes. Layers of linear attention keep a state per request instead."""
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    heads = max(1, model.num_key_value_heads // generator.tensor_parallel_size)
    stages = generator.engine_gpus // generator.tensor_parallel_size
    linear = (getattr(model, "layer_types", None) or []).count("linear_attention")
    layers = min(-(-model.num_hidden_layers // stages), model.num_hidden_layers - linear)
    return int(2 * layers * heads * head_dim * ITEM_BYTES[dtype])


def request_bytes(model: Any, generator: GeneratorConfig, dtype: str) -> int:
    """Bytes that the longest request takes in the KV cache on each GPU of an engine, in whole blocks."""
    blocks = -(-generator.longest_row // BLOCK_TOKENS) + 1
    tokens = blocks * BLOCK_TOKENS * kv_token_bytes(model, generator, dtype)
    linear: int = (getattr(model, "layer_types", None) or []).count("linear_attention")
    if not linear:
        return tokens
    # each layer of linear attention has two float32 states; blocks of full attention are as large as a state
    values: int = model.linear_num_value_heads * model.linear_value_head_dim
    state: int = 4 * values * (model.linear_key_head_dim + 3 * model.linear_conv_kernel_dim)
    layers: int = model.num_hidden_layers
    return tokens + (layers + linear) * state


def check_engine(model: Any, generator: GeneratorConfig, dtype: str) -> None:
    """Raises `UserError` if an engine's GPUs cannot split the model, or its KV cache cannot hold the longest
    request."""
    gpus, kv_heads = generator.tensor_parallel_size, model.num_key_value_heads
    numbers = {name: number for name in DIVIDED if (number := getattr(model, name, None))}
    numbers["vocabulary rows"] = -(-model.vocab_size // VOCABULARY_ROWS) * VOCABULARY_ROWS
    wrong = [f"{name} {number}" for name, number in numbers.items() if number % gpus]
    if kv_heads % gpus and gpus % kv_heads:  # with fewer key heads than GPUs, the heads are replicated
        wrong.append(f"num_key_value_heads {kv_heads}")
    if wrong:
        raise UserError(
            f"generator.tensor_parallel_size: {gpus} GPUs cannot divide the model among themselves "
            f"({', '.join(wrong)}); use a divisor of these numbers"
        )
    size, longest = generator.kv_cache_bytes, request_bytes(model, generator, dtype)
    if size is not None and size < longest:
        raise UserError(
            f"generator.kv_cache_bytes: {size} cannot hold one request of generator.max_input_length + "
            f"max_generate_length ({generator.longest_row}) tokens, which takes {longest} bytes; raise it"
        )


def made_model(make: MakeModelConfig, env: EnvConfig) -> SimpleNamespace:
    """The numbers in the config.json of a model that a run makes. `UserError` if the environment has no words."""
    words = synthetic_data(env.name, env.trusted_modules, "vocabulary")()
    return SimpleNamespace(**make.dimensions, vocab_size=len(words_of(words)))
