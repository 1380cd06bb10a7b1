"""Small random models of some families, and routing for those with experts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from service.types import MicroBatch
from tests.pure.learn.builders import VOCABULARY

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**COMMON, **EXPERTS, head_dim=8, mlp_only_layers=[1], norm_topk_prob=True),
    "qwen2_moe": Qwen2MoeConfig(**COMMON, **EXPERTS, shared_expert_intermediate_size=24, decoder_sparse_step=1),
}


def saved(name: str, parent: Path) -> Path:
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES[name].to_dict()))
    model.save_pretrained(parent / name)
    return parent / name


def replayed(micro: MicroBatch, layers: int, natively: float, seed: int = 0) -> MicroBatch:
    """Routing drawn at random; a share of tokens routes natively."""
    rng = np.random.default_rng(seed)
    n_tokens = len(micro.token_ids_N)
    experts = rng.permuted(np.tile(np.arange(6), (n_tokens, layers, 1)), axis=-1)[..., :2].astype(np.int16)
    experts[rng.random(n_tokens) < natively] = -1
    return replace(micro, routed_experts_N=experts)
