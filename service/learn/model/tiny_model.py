"""Writes a small Qwen3 model with random weights as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from service.config.tree import MakeModelConfig


def count_parameters(shape: MakeModelConfig, vocab_size: int) -> int:
    """Number of parameters in the matrices of a model of this shape; the few parameters of its norms are not
    counted."""
    attention = 2 * shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return shape.num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size) + (
        vocab_size * shape.hidden_size
    )


def make_model(
    folder: Path, shape: MakeModelConfig, vocab_size: int, eos_token_id: int, pad_token_id: int, seed: int
) -> None:
    """Write a Qwen3 model with random weights and tied embeddings: config.json and model.safetensors."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
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
