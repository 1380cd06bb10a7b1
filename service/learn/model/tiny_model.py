"""Writes a small Qwen3 model with random weights as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM


def count_parameters(dimensions: Mapping[str, int], vocab_size: int) -> int:
    """Number of parameters in the matrices of a model; the few parameters of its norms are not counted."""
    heads = dimensions["num_attention_heads"] + dimensions["num_key_value_heads"]
    of_token = 2 * heads * dimensions["head_dim"] + 3 * dimensions["intermediate_size"]
    return dimensions["hidden_size"] * (dimensions["num_hidden_layers"] * of_token + vocab_size)


def make_model(
    folder: Path, dimensions: Mapping[str, int], vocab_size: int, eos_token_id: int, pad_token_id: int, seed: int
) -> None:
    """Write a Qwen3 model with random weights and tied embeddings: config.json and model.safetensors. `dimensions`: by
    their names in config.json, as in `MakeModelConfig.dimensions`."""
    config = Qwen3Config(
        **dimensions,
        vocab_size=vocab_size,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [Qwen3ForCausalLM.__name__]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file(dict(model.named_parameters()), weights, metadata={"format": "pt"})
    # safetensors creates files that only their owner may read
    shutil.copymode(folder / "config.json", weights)
