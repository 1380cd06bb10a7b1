"""Training steps of the learner, from random weights: tokens a second, model FLOPs utilisation, peak memory.

Needs this project's own dependencies; neither Ray nor vLLM.

Model FLOPs utilisation = model FLOPs / time / the GPU's dense bfloat16 peak. Model FLOPs of a step are 6 per token and
parameter of the layers' matrices, 6 per *loss* token and parameter of the output head, and causal attention counted
half: 6 * layers * heads * head_dim * length^2 a row. Neither recomputation nor padding counts. A step is all from the
micro-batches in host memory to the new weights.

`samples` and `shared_prefix` train the same rows, eight of each prompt, packed and with the prompts computed once. Both
count all tokens of the rows, so that what sharing saves shows as more tokens a second and a higher utilisation.

A shape that does not fit is tried again with gradient checkpointing, and then with half of its layers, whose
utilisation is nearly that of all.
"""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.advantage import synchronize
from benchmarks.gpu.parts import Figures, Give
from benchmarks.learn import made_row, micro_batch_of
from service.config.learn import TrainerConfig
from service.config.tree import Config, ModelConfig
from service.handoff.batches.pack import MIN_SHARED
from service.learn.learner import Learner
from service.learn.model.attention import use_fastest_attention
from service.learn.model.policy import Policy
from service.learn.settings import LearnSettings
from service.types import MicroBatch, MiniBatch, SupervisedRow

SHAPES = {
    "cuda": {
        "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
        "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
        "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    },
    "cpu": {
        "tiny": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8},
    },
}
"""Qwen3 shapes by device; all with 8 key heads."""
KV_HEADS = 8
HEAD_DIM = {"cuda": 128, "cpu": 8}
VOCABULARY = {"cuda": 151936, "cpu": 500}
TOKENS = {"cuda": 16384, "cpu": 64}
"""Tokens of a micro-batch."""
MICRO_BATCHES = 4
REPEATS = {"cuda": 3, "cpu": 1}
"""Steps that are timed, after as many that warm up."""
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"layout": "packed"},
    "eager": {"layout": "packed", "compile": False},
    "padded": {"layout": "padded"},
    "samples": {"layout": "packed"},
    "shared_prefix": {"layout": "shared_prefix"},
}
"""Settings of the trainer that are compared."""
OF_PROMPTS = ("samples", "shared_prefix")
"""Variants whose rows are samples of prompts."""
SAMPLES = 8
EVERY_VARIANT = ("0.6B", "tiny")
"""Shapes that are measured with every variant; the others with the first two."""
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bfloat16 FLOP/s by the vendor's data sheets (SXM)."""


def measure(device: str, give: Give) -> None:
    """Every shape with every variant."""
    for name, shape in SHAPES[device].items():
        for variant in VARIANTS if name in EVERY_VARIANT else list(VARIANTS)[:2]:
            named: Figures = {"shape": name, "variant": variant}
            give(named | _what_fits(torch.device(device), shape, variant))


def _what_fits(device: torch.device, shape: dict[str, int], variant: str) -> Figures:
    """The figures of the first of these that fits: the whole, with checkpointing, half of the layers with it."""
    half = shape | {"num_hidden_layers": shape["num_hidden_layers"] // 2}
    for tried, checkpointing in ((shape, False), (shape, True), (half, True)):
        found: Figures = {"layers": tried["num_hidden_layers"], "checkpointing": str(checkpointing)}
        try:
            trainer = TrainerConfig(gradient_checkpointing=checkpointing, **VARIANTS[variant])
            return found | _steps(device, tried, trainer, variant in OF_PROMPTS)
        except torch.OutOfMemoryError:
            continue
        finally:
            torch._dynamo.reset()
            gc.collect()  # a learner and its compiled layers refer to each other
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return found | {"milliseconds": "out of memory"}


def _steps(device: torch.device, shape: dict[str, int], trainer: TrainerConfig, of_prompts: bool) -> Figures:
    """Median time of warmed-up steps and peak memory."""
    batch, repeats = mini_batch(device.type, of_prompts), REPEATS[device.type]
    seconds = []
    with learner(device, shape, trainer) as trained:
        for number in range(2 * repeats):
            if number == repeats and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            synchronize(device)
            started = time.perf_counter()
            report = trained.step(batch)
            synchronize(device)
            seconds.append(time.perf_counter() - started)
            if not report.applied:
                raise RuntimeError(f"the step was not applied: {report.reason}")
    step, micros = float(np.median(seconds[repeats:])), batch.ranks[0]
    figures: Figures = {
        "attention": use_fastest_attention(device),
        "first_step_s": seconds[0],
        "milliseconds": step * 1e3,
        "tokens_a_second": sum(len(micro.token_ids_N) for micro in micros) / step,
    }
    if device.type == "cuda":
        flops = sum(model_flops(shape, micro) for micro in micros)
        figures |= {"utilisation": flops / step / peak(), "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    return figures


def peak() -> float:
    """The GPU's data-sheet rate; NaN for one that is not listed."""
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in PEAKS.items() if part in name), float("nan"))


def row_lengths(tokens: int, seed: int) -> np.ndarray:
    """Long-tail row lengths (lognormal, sigma 1, longest a quarter of the budget) that fill the budget exactly."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = [tokens // 4]
    while sum(lengths) < tokens:
        drawn = int(np.clip(rng.lognormal(np.log(tokens / 24), 1.0), tokens // 256, tokens // 4))
        lengths.append(min(max(drawn, 2), tokens - sum(lengths)))
    return rng.permutation(lengths)


def samples(tokens: int, vocabulary: int, rng: np.random.Generator) -> list[SupervisedRow]:
    """Rows of one prompt, an eleventh of the budget long but worth sharing, with responses of a fifth of it."""
    prompt = rng.integers(0, vocabulary, max(2 * MIN_SHARED, tokens // 11))
    lengths = rng.integers(len(prompt) // 7, len(prompt) // 4, SAMPLES)
    return [made_row(np.concatenate([prompt, rng.integers(0, vocabulary, length)]), len(prompt)) for length in lengths]


def mini_batch(device: str, of_prompts: bool = False) -> MiniBatch:
    """Micro-batches of random tokens; two thirds of each row carry loss, or of samples of a prompt the responses."""
    micros: list[MicroBatch] = []
    n_rows = 0
    for seed in range(MICRO_BATCHES):
        rng = np.random.default_rng(seed)
        lengths = row_lengths(TOKENS[device], seed)
        rows = (
            samples(TOKENS[device], VOCABULARY[device], rng)
            if of_prompts
            else [made_row(rng.integers(0, VOCABULARY[device], length), length // 3) for length in lengths]
        )
        micros.append(micro_batch_of(rows, list(range(n_rows, n_rows + len(rows)))))
        n_rows += len(rows)
    loss_tokens = [np.add.reduceat(micro.loss_mask_N, micro.offsets_R[:-1], dtype=np.int64) for micro in micros]
    return MiniBatch(
        lease=0,
        groups=(0,),
        advantage_G=np.random.default_rng(0).normal(size=n_rows).astype(np.float32),
        return_G=np.zeros(n_rows),
        loss_tokens_G=np.concatenate(loss_tokens),
        rows_G=np.ones(n_rows, np.int32),
        prompt_of_trajectory_G=np.zeros(n_rows, np.int32),
        ranks=(tuple(micros),),
        metrics={},
    )


def model_flops(shape: dict[str, int], micro: MicroBatch) -> float:
    """FLOPs of forward and backward pass on a GPU's shape, as defined above."""
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    attention = hidden * HEAD_DIM["cuda"] * (2 * heads + 2 * KV_HEADS)
    matrices = layers * (attention + 3 * hidden * shape["intermediate_size"])
    rows = float(np.square(np.diff(micro.offsets_R).astype(np.float64)).sum())
    head = 6.0 * hidden * VOCABULARY["cuda"] * int(micro.loss_mask_N.sum())
    return 6.0 * matrices * len(micro.token_ids_N) + head + 6.0 * layers * heads * HEAD_DIM["cuda"] * rows


@contextlib.contextmanager
def learner(device: torch.device, shape: dict[str, int], trainer: TrainerConfig) -> Iterator[Learner]:
    """A learner of this shape with random bfloat16 weights."""
    config = Config(model=ModelConfig(dtype="bfloat16"), trainer=trainer)
    described = shape | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCABULARY[device.type],
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM[device.type],
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(described))
        settings = LearnSettings.of(config)
        policy = Policy(settings, Path(folder), device, 0, 1, random_weights=True)
        yield Learner(settings, Path(folder), device, 0, 1, policy)
