"""Estimated utilisation, memory and largest models on H100s, without a GPU.

    python -m benchmarks.estimates
    python -m benchmarks.estimates bars

Times are computed from the operations of a real step under fake tensors (`service.learn.estimate`) and the rates that
kernels reach, without launch gaps and collectives. Utilisation counts neither recomputation nor the optimizer's step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from service.config.learn import TrainerConfig
from service.config.rollout import GeneratorConfig
from service.config.tree import Config
from service.learn.estimate.fit import GPU_BYTES, MARGIN, fit
from service.learn.estimate.gpus import H100
from service.learn.estimate.step import StepEstimate, estimate_step
from service.learn.settings import FitSettings

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

BUDGET = 16384
"""Tokens of a micro-batch."""
TO_HOST, REGISTERED, PAGEABLE = 45.6e9, 53.7e9, 6.1e9
"""Bytes/s between an H100 and its host, measured: a rank's copy of its weights, and copies to the GPU from shared
memory that is registered with CUDA or not."""


def model_folder(name: str, parent: Path) -> Path:
    """A folder with the `config.json` of a published model, without weights."""
    folder = parent / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder


def configured(ranks: int, row_tokens: int, **trainer: Any) -> FitSettings:
    """Settings with `BUDGET` tokens in a micro-batch."""
    generator = GeneratorConfig(max_input_length=row_tokens // 2, max_generate_length=row_tokens // 2)
    ranks_of = TrainerConfig(ranks=ranks, max_tokens_per_micro_batch=BUDGET, **trainer)
    return FitSettings.of(Config(generator=generator, trainer=ranks_of))


def utilisations(parent: Path) -> None:
    """Print the utilisation of one of four ranks by the number of checkpointed layers, with eager and fused layers."""
    print("| model, rows | checkpointed layers | eager | fused | GB of a rank |\n|---|---|---|---|---|")
    for name in ("Qwen3-1.7B", "Qwen3-4B"):
        for row_tokens in (2048, BUDGET):
            found, folder = {}, model_folder(name, parent)
            for checkpointing, layers in ((False, "none"), (2, "every 2nd"), (True, "all")):
                config = configured(4, row_tokens, gradient_checkpointing=checkpointing)
                step = found[layers] = estimate_step(config.learn, folder)
                eager, fused = (
                    f"{step.model_flops / seconds / H100.flops:.1%}"
                    for seconds in (sum(step.seconds.values()), step.fused_seconds)
                )
                rows, held = f"{row_tokens // 1024}k", f"{step.peak_bytes / 1e9:.1f}"
                print(f"| {name}, {rows} | {layers} | {eager} | {fused} | {held} |", flush=True)
            print(f"| {name}, {rows} | {automatic(configured(4, row_tokens), folder, found['none'], found['all'])} |")


def automatic(config: FitSettings, folder: Path, none: StepEstimate, all_layers: StepEstimate) -> str:
    """The level of checkpointing that fits GPUs of 80 GB, with utilisation and memory."""
    found = fit(config, folder, GPU_BYTES["H100"])
    chosen, share = found.checkpointing, found.checkpointing.layers / found.n_layers
    seconds = (1 - share) * none.fused_seconds + share * all_layers.fused_seconds
    words = f"auto: {chosen.layers} of {found.n_layers}"
    used = none.model_flops / seconds / H100.flops
    return f"{words} | | {used:.1%} | {found.step.peak_bytes / 1e9:.1f}"


def largest_models(parent: Path) -> None:
    """Print which models fit on 80 GB per rank, with all weights trained, checkpointing, and rows of 16k tokens."""
    print("\n| model | ranks | GB of a rank | fits |\n|---|---|---|---|")
    for name, ranks in (("Qwen3-8B", 4), ("Qwen3-14B", 4), ("Qwen3-14B", 8), ("Qwen3-32B", 8), ("Qwen3-32B", 16)):
        config = configured(ranks, BUDGET, gradient_checkpointing=True)
        step = estimate_step(config.learn, model_folder(name, parent))
        fits = "yes" if step.peak_bytes <= (1 - MARGIN) * GPU_BYTES["H100"] else "no"
        print(f"| {name} | {ranks} | {step.peak_bytes / 1e9:.1f} | {fits} |", flush=True)


def bars(parent: Path) -> None:
    """Print the utilisation without checkpointing, and the seconds of a publication by the rates of links.

    Layers with experts count as eager, all others as compiled.

    A publication copies each rank's bfloat16 rows to its host's memory, and from there into each engine, at the rates
    that were measured for registered and for other memory.
    """
    print("| model | rows | utilisation |\n|---|---|---|")
    for name, row_tokens in (
        ("Qwen3-1.7B", 1024),
        ("Qwen3-1.7B", 4096),
        ("Llama-3.1-8B", 4096),
        ("Qwen3-30B-A3B", 4096),
    ):
        config = configured(8, row_tokens, gradient_checkpointing=False)
        step = estimate_step(config.learn, model_folder(name, parent))
        whole = sum(step.seconds.values()) if "num_experts" in SHAPES[name] else step.fused_seconds
        used = step.model_flops / whole / H100.flops
        print(f"| {name} | {row_tokens // 1024}k | {used:.1%} |", flush=True)
    weights = 8.03e9 * 2
    print(f"8B on 8 ranks: {weights / 8 / 1e9:.1f} GB a rank, to the host {weights / 8 / TO_HOST:.2f} s")
    print(
        f"8B into an engine: {weights / REGISTERED:.2f} s from registered memory, {weights / PAGEABLE:.1f} s otherwise"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        if sys.argv[1:] == ["bars"]:
            bars(Path(made))
            sys.exit()
        utilisations(Path(made))
        largest_models(Path(made))
