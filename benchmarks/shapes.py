"""The shapes of published models, and folders with their `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
QWEN3 |= {"max_position_embeddings": 40960, "tie_word_embeddings": True}
QWEN2 = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SMOLLM2 = {"model_type": "llama", "vocab_size": 49152, "head_dim": 64, "num_key_value_heads": 3}
SMOLLM2 |= {"max_position_embeddings": 8192, "tie_word_embeddings": True}
EXPERTS = {"model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 4}
EXPERTS |= {"max_position_embeddings": 262144, "tie_word_embeddings": False, "num_experts": 128}
EXPERTS |= {"num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
EXPERT_SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads")
LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
LLAMA |= {"tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": SMOLLM2 | dict(zip(SIZES, (576, 1536, 30, 9), strict=True)),
    "Qwen2.5-0.5B": QWEN2 | dict(zip(SIZES, (896, 4864, 24, 14), strict=True)) | {"num_key_value_heads": 2},
    "Qwen2.5-1.5B": QWEN2 | dict(zip(SIZES, (1536, 8960, 28, 12), strict=True)) | {"num_key_value_heads": 2},
    "Qwen2.5-3B": QWEN2 | dict(zip(SIZES, (2048, 11008, 36, 16), strict=True)) | {"num_key_value_heads": 2},
    "Qwen2.5-7B": QWEN2
    | dict(zip(SIZES, (3584, 18944, 28, 28), strict=True))
    | {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "Qwen3-0.6B": QWEN3 | dict(zip(SIZES, (1024, 3072, 28, 16), strict=True)),
    "Qwen3-1.7B": QWEN3 | dict(zip(SIZES, (2048, 6144, 28, 16), strict=True)),
    "Qwen3-4B": QWEN3 | dict(zip(SIZES, (2560, 9728, 36, 32), strict=True)),
    "Qwen3-8B": QWEN3 | dict(zip(SIZES, (4096, 12288, 36, 32), strict=True)) | {"tie_word_embeddings": False},
    "Qwen3-14B": QWEN3 | dict(zip(SIZES, (5120, 17408, 40, 40), strict=True)) | {"tie_word_embeddings": False},
    "Qwen3-32B": QWEN3 | dict(zip(SIZES, (5120, 25600, 64, 64), strict=True)) | {"tie_word_embeddings": False},
    "Qwen3-30B-A3B": EXPERTS | dict(zip(EXPERT_SIZES, (2048, 6144, 768, 48, 32), strict=True)),
    "Llama-3.1-8B": LLAMA | dict(zip(SIZES, (4096, 14336, 32, 32), strict=True)),
}
"""The shapes of published models, from the `config.json` of `Qwen/<name>`, `HuggingFaceTB/<name>` and
`meta-llama/<name>` on Hugging Face; the instruct models have the same shapes."""


def model_folder(name: str, parent: Path) -> Path:
    """A folder with the `config.json` of a published model, without weights."""
    return shape_folder(SHAPES[name], parent / name)


def shape_folder(shape: dict[str, Any], folder: Path) -> Path:
    """The folder, made with this `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return folder
