"""Training steps of the learner on one CUDA GPU, from random weights.

    python -m benchmarks.gpu_learn                        all shapes, packed and padded, compiled layers
    python -m benchmarks.gpu_learn --shapes 1.7B --tokens 16384 --no-compile

Needs torch with CUDA and this project's own dependencies; neither Ray nor vLLM.

Model FLOPs utilisation = model FLOPs / time / the GPU's dense bfloat16 peak. Model FLOPs of a step are 6 per token and
parameter of the layers' matrices, 6 per *loss* token and parameter of the output head, and causal attention counted
half: 6 * layers * heads * head_dim * length^2 a row. Neither recomputation nor padding counts. A step is all from the
micro-batch in host memory to the new weights, one micro-batch a step, so the optimizer weighs more than in training.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.learn import micro_batch_of
from service.config.learn import TrainerConfig
from service.config.tree import Config, ModelConfig
from service.learn.learner import Learner
from service.learn.losses.expand_to_tokens import expand_to_tokens, row_of_token
from service.learn.model.policy import Policy
from service.types import MicroBatch, MiniBatch

CUDA = torch.device("cuda")
VOCABULARY = 151936
SHAPES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
KV_HEADS, HEAD_DIM = 8, 128
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bfloat16 FLOP/s by the vendor's data sheets (SXM)."""


def peak() -> float:
    """The GPU's data-sheet rate; NaN for one that is not listed."""
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in PEAKS.items() if part in name), float("nan"))


def row_lengths(tokens: int, seed: int) -> np.ndarray:
    """Long-tail row lengths (lognormal, sigma 1, longest a quarter of the budget) that fill the budget exactly."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = [tokens // 4]
    while sum(lengths) < tokens:
        drawn = int(np.clip(rng.lognormal(np.log(tokens / 24), 1.0), 64, tokens // 4))
        lengths.append(min(drawn, tokens - sum(lengths)))
    return rng.permutation(lengths)


def mini_batch(tokens: int, seed: int = 0) -> MiniBatch:
    """One micro-batch of random tokens; two thirds of each row carry loss."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in row_lengths(tokens, seed)]
    micro = micro_batch_of(ids, list(range(len(ids))))
    counted = np.concatenate([[0], np.cumsum(micro.loss_mask_N)])
    return MiniBatch(
        lease=0,
        groups=(0,),
        advantage_G=rng.normal(size=len(ids)).astype(np.float32),
        return_G=np.zeros(len(ids)),
        loss_tokens_G=np.diff(counted[micro.offsets_R]).astype(np.int64),
        rows_G=np.ones(len(ids), np.int32),
        prompt_of_trajectory_G=np.zeros(len(ids), np.int32),
        ranks=((micro,),),
        metrics={},
    )


def model_flops(shape: dict[str, int], micro: MicroBatch) -> float:
    """FLOPs of forward and backward pass, as defined above."""
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    attention = hidden * HEAD_DIM * (2 * heads + 2 * KV_HEADS)
    matrices = layers * (attention + 3 * hidden * shape["intermediate_size"])
    rows = float(np.square(np.diff(micro.offsets_R).astype(np.float64)).sum())
    head = 6.0 * hidden * VOCABULARY * int(micro.loss_mask_N.sum())
    return 6.0 * matrices * len(micro.token_ids_N) + head + 6.0 * layers * heads * HEAD_DIM * rows


@contextlib.contextmanager
def learner(shape: dict[str, int], trainer: TrainerConfig) -> Iterator[Learner]:
    """A learner of this shape with random bfloat16 weights."""
    config = Config(model=ModelConfig(dtype="bfloat16"), trainer=trainer)
    described = shape | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCABULARY,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(described))
        policy = Policy(config, Path(folder), CUDA, 0, 1, random_weights=True)
        yield Learner(config, Path(folder), CUDA, 0, 1, policy)


def measure_steps(name: str, tokens: int, trainer: TrainerConfig, repeats: int) -> dict[str, float | str]:
    """Median time of warmed-up steps and peak memory."""
    shape, batch = SHAPES[name], mini_batch(tokens)
    with learner(shape, trainer) as trained:
        for _ in range(3):
            trained.step(batch)
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            started = time.perf_counter()
            report = trained.step(batch)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        if not report.applied:
            raise RuntimeError(f"the step was not applied: {report.reason}")
    step = float(np.median(seconds))
    return {
        "shape": name,
        "layout": trainer.layout,
        "tokens": float(tokens),
        "milliseconds": step * 1e3,
        "tokens_a_second": tokens / step,
        "utilisation": model_flops(shape, batch.ranks[0][0]) / step / peak(),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def timed(function: object, repeats: int = 20) -> float:
    """Seconds of one call on the device."""
    if not callable(function):
        raise TypeError("not callable")
    for _ in range(3):
        function()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        function()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3 / repeats


def measure_expand_to_tokens(tokens: int = 1 << 27, rows: int = 1 << 16) -> dict[str, float]:
    """Bandwidth of `expand_to_tokens` (index and mask read, value written) against that of a copy."""
    bounds = torch.linspace(0, tokens, rows + 1, device=CUDA, dtype=torch.float64).long()
    row_N = row_of_token(bounds, tokens)
    mask_N = torch.ones(tokens, dtype=torch.bool, device=CUDA)
    value_G = torch.randn(rows // 4, device=CUDA)
    trajectory_R = torch.arange(rows, device=CUDA) // 4
    seconds = timed(lambda: expand_to_tokens(value_G, trajectory_R, row_N, mask_N))
    moved = tokens * (row_N.element_size() + mask_N.element_size() + value_G.element_size())
    source, target = torch.empty_like(row_N), torch.empty_like(row_N)
    copied = 2 * tokens * row_N.element_size() / timed(lambda: target.copy_(source))
    return {
        "expand_to_tokens_gb_s": moved / seconds / 1e9,
        "copy_gb_s": copied / 1e9,
        "fraction": moved / seconds / copied,
    }


def main() -> int:
    """Measure and print one line a measurement; the last line is JSON."""
    parser = argparse.ArgumentParser(description="training steps on one CUDA GPU")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384, 32768])
    parser.add_argument("--layouts", nargs="+", default=["packed", "padded"], choices=["packed", "padded"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--checkpointing", action="store_true", help="recompute the layers in the backward pass")
    parser.add_argument("--fused-kernels", action="store_true", help="use Liger kernels")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu_learn needs a CUDA GPU, and torch finds none", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, peak {peak() / 1e12:.0f} TFLOP/s")
    results: list[dict[str, float | str]] = []
    for name in options.shapes:
        for tokens in options.tokens:
            for layout in options.layouts:
                trainer = TrainerConfig(
                    layout=layout,
                    compile=not options.no_compile,
                    gradient_checkpointing=options.checkpointing,
                    fused_kernels=options.fused_kernels,
                )
                results.append(_attempt(name, tokens, trainer, options.repeats))
                print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in results[-1].items()))
    bandwidth = measure_expand_to_tokens()
    print(" ".join(f"{key}={value:.4g}" for key, value in bandwidth.items()))
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "steps": results, "expand_to_tokens": bandwidth}))
    return 0


def _attempt(name: str, tokens: int, trainer: TrainerConfig, repeats: int) -> dict[str, float | str]:
    try:
        return measure_steps(name, tokens, trainer, repeats)
    except torch.cuda.OutOfMemoryError:
        return {"shape": name, "layout": trainer.layout, "tokens": float(tokens), "failed": "out of memory"}
    finally:
        torch.cuda.empty_cache()
        torch._dynamo.reset()


if __name__ == "__main__":
    sys.exit(main())
