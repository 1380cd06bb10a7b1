"""What `baton plan` predicts for settings that other systems have published, beside what they measured.

    python -m benchmarks.plan_field

Only settings that state hardware, model, mean length and batch. Nothing here is fitted: the constants are those of
`service.plan`. Where a setting leaves something open, the comment beside it says what was taken.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.estimates import EXPERT_SIZES, EXPERTS, SHAPES, configured
from service.learn.estimate.step import StepEstimate, estimate_step
from service.learn.model.hf_config import read_config
from service.plan.engine import Engine, Shape
from service.plan.machine.costs import TRAINER
from service.plan.machine.device import profile
from service.plan.step_seconds import Setting, flow_of
from service.plan.trainer import Trainer
from service.plan.weights import update

MODELS: dict[str, dict[str, Any]] = {
    **SHAPES,
    "Qwen3-235B-A22B": EXPERTS | dict(zip(EXPERT_SIZES, (4096, 12288, 1536, 94, 64), strict=True)),
}
"""With the shapes of `benchmarks.estimates`; from the `config.json` of these models on Hugging Face."""

FEW, MORE = 2, 4
"""Layers of two estimates, from which that of a whole model follows: a step is linear in its layers."""
FLASH_ATTENTION_3 = 1.8
"""Speed of FlashAttention 3 over 2 (docs/performance.md)."""
SIGMA = 0.5
"""Spread of lengths, which no setting states."""
FORWARDS = 5 / 3
"""Passes of NeMo RL over a token: forward and backward, and log-probabilities of the policy and of a reference."""


@dataclass(frozen=True)
class Row:
    """A published figure."""

    system: str
    setting: str
    seconds: float
    predicted: float

    @property
    def factor(self) -> float:
        """The larger over the smaller of the two."""
        return max(self.seconds, self.predicted) / min(self.seconds, self.predicted)


@cache
def trainer_of(name: str, row_tokens: int = 4096) -> Trainer:
    """The trainer of a model of which all layers are computed again in the backward pass."""
    steps = []
    for layers in (FEW, MORE):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODELS[name] | {"num_hidden_layers": layers}))
            config = configured(8, row_tokens, gradient_checkpointing=True)
            steps.append(estimate_step(config.learn, Path(folder)))
    step = whole(*steps, MODELS[name]["num_hidden_layers"])
    budget = configured(8, row_tokens).learn.trainer.max_tokens_per_micro_batch
    dense = "num_experts" not in MODELS[name]
    return Trainer(step, 8, 1.0, dense, budget, row_tokens, 1.0)


def whole(few: StepEstimate, more: StepEstimate, layers: int) -> StepEstimate:
    """The estimate of so many layers from those of `FEW` and `MORE`."""

    def line(a: float, b: float) -> float:
        return a + (b - a) * (layers - FEW) / (MORE - FEW)

    return replace(
        few,
        parameters=int(line(few.parameters, more.parameters)),
        peak={},
        flops=line(few.flops, more.flops),
        model_flops=line(few.model_flops, more.model_flops),
        sent=line(few.sent, more.sent),
        seconds={kind: line(few.seconds.get(kind, 0.0), more.seconds[kind]) for kind in more.seconds},
        optimizer_seconds=line(few.optimizer_seconds, more.optimizer_seconds),
    )


def shape_of(name: str) -> Shape:
    """The shape of a model."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        return Shape.of(read_config(Path(folder)))


PRIME_RL = "prime-rl, benchmarks/results/BENCHMARKS.md, 2026-02-07: seconds of a micro-batch, all layers recomputed"
# model, kind, tokens, kernel, GPUs, GPU, seconds
MICRO_BATCHES = (
    ("Qwen3-0.6B", "RL", 16384, "FA3", 1, "h100", 1.38),
    ("Qwen3-0.6B", "RL", 65536, "FA3", 1, "h100", 6.46),
    ("Qwen3-0.6B", "SFT", 8192, "FA3", 1, "h100", 0.32),
    ("Qwen3-0.6B", "SFT", 16384, "FA3", 1, "h100", 0.64),
    ("Qwen3-4B", "RL", 16384, "FA2", 8, "b200", 3.26),
    ("Qwen3-4B", "RL", 16384, "FA3", 8, "h200", 4.78),
    ("Qwen3-4B", "RL", 16384, "FA3", 8, "h100", 5.04),
    ("Qwen3-4B", "RL", 65536, "FA3", 8, "h200", 17.75),
    ("Qwen3-4B", "RL", 65536, "FA3", 8, "h100", 18.10),
    ("Qwen3-4B", "RL", 65536, "FA2", 8, "b200", 20.20),
    ("Qwen3-4B", "SFT", 16384, "FA2", 8, "b200", 1.98),
    ("Qwen3-4B", "SFT", 16384, "FA2", 8, "h200", 2.47),
    ("Qwen3-4B", "SFT", 16384, "FA2", 8, "h100", 2.64),
    ("Qwen3-4B", "SFT", 65536, "FA2", 8, "b200", 19.86),
    ("Qwen3-30B-A3B", "RL", 16384, "FA2", 8, "b200", 9.66),
    ("Qwen3-30B-A3B", "RL", 16384, "FA3", 8, "h100", 21.44),
    ("Qwen3-30B-A3B", "RL", 16384, "FA3", 8, "h200", 22.06),
    ("Qwen3-30B-A3B", "RL", 65536, "FA2", 8, "b200", 31.69),
    ("Qwen3-30B-A3B", "RL", 65536, "FA3", 8, "h200", 41.13),
    ("Qwen3-30B-A3B", "SFT", 16384, "FA2", 8, "b200", 2.35),
    ("Qwen3-30B-A3B", "SFT", 16384, "FA3", 8, "h200", 3.74),
)
"""Rows of full training whose attention kernel and GPU a profile covers; rows with LoRA, FA4 or an A6000 are not."""


def micro_batches() -> Iterator[Row]:
    """Seconds of a micro-batch of one row a rank."""
    for model, kind, tokens, kernel, gpus, gpu, seconds in MICRO_BATCHES:
        device = profile(gpu)
        if kernel == "FA3":
            faster = {"attention": device.attention * FLASH_ATTENTION_3}
            device = replace(device, **faster)
        trainer = trainer_of(model)
        predicted = trainer.seconds(device, gpus, gpus * tokens / TRAINER["imbalance"], tokens, tokens)
        predicted -= trainer.seconds(device, gpus, 0.0, tokens, tokens)
        yield Row("prime-rl", f"{model} {kind}, {tokens} tokens, {kernel}, {gpus} {gpu.upper()}", seconds, predicted)


NEMO = "NeMo RL, docs/about/performance-summary.md of v0.4, v0.5 and v0.6: seconds of a step, H100, bfloat16"
# version, model, steps off, mean length, longest, GPUs, trajectories, tensor parallelism, GPUs that generate, seconds
STEPS = (
    ("0.4", "Llama-3.1-8B", 0, 1060, 4096, 16, 2048, 1, 16, 97.7),
    ("0.4", "Llama-3.1-8B", 1, 1129, 4096, 16, 2048, 1, 8, 74.6),
    ("0.4", "Qwen3-32B", 0, 3206, 4096, 32, 2048, 4, 32, 393.0),
    ("0.4", "Qwen3-32B", 1, 3207, 4096, 64, 2048, 4, 32, 215.0),
    ("0.4", "Qwen3-30B-A3B", 0, 3154, 4096, 32, 2048, 4, 32, 225.0),
    ("0.4", "Qwen3-30B-A3B", 1, 3158, 4096, 32, 2048, 2, 16, 244.0),
    ("0.4", "Qwen3-235B-A22B", 0, 5671, 8192, 128, 512, 16, 128, 506.0),
    ("0.4", "Qwen3-235B-A22B", 1, 5691, 8192, 256, 512, 8, 128, 241.0),
    ("0.5", "Llama-3.1-8B", 0, 1019, 4096, 16, 2048, 1, 16, 92.8),
    ("0.5", "Llama-3.1-8B", 1, 1123, 4096, 16, 2048, 1, 8, 64.8),
    ("0.5", "Qwen3-30B-A3B", 0, 3196, 4096, 32, 2048, 2, 32, 198.0),
    ("0.5", "Qwen3-30B-A3B", 1, 3201, 4096, 32, 2048, 2, 16, 154.0),
    ("0.5", "Qwen3-32B", 0, 3251, 4096, 32, 2048, 4, 32, 376.0),
    ("0.5", "Qwen3-32B", 1, 3252, 4096, 64, 2048, 4, 32, 200.0),
    ("0.5", "Qwen3-235B-A22B", 0, 5700, 8192, 128, 512, 16, 128, 431.0),
    ("0.5", "Qwen3-235B-A22B", 1, 5707, 8192, 256, 512, 8, 128, 203.0),
    ("0.6", "Qwen3-30B-A3B", 0, 3203, 4096, 32, 2048, 2, 32, 192.0),
    ("0.6", "Qwen3-30B-A3B", 1, 3201, 4096, 32, 2048, 2, 16, 152.0),
    ("0.6", "Qwen3-30B-A3B", 8, 3206, 4096, 192, 2048, 2, 64, 34.5),
    ("0.6", "Qwen3-235B-A22B", 0, 5698, 8192, 128, 512, 16, 128, 395.0),
    ("0.6", "Qwen3-235B-A22B", 0, 5713, 8192, 256, 512, 16, 256, 312.0),
    ("0.6", "Qwen3-235B-A22B", 1, 5721, 8192, 256, 512, 8, 128, 231.0),
)
"""Models of the supported families; DeepSeek V3 and Nemotron are not. The split is that of the recipe's file."""
PROMPT, SAMPLES = 150, 32
"""Tokens of a prompt of OpenMathInstruct-2, about, and trajectories of a prompt in the recipes."""


def steps() -> Iterator[Row]:
    """Seconds of whole steps, on-policy and some steps off."""
    device = profile("h100")
    for version, model, off, mean, longest, gpus, count, parallel, generating, seconds in STEPS:
        shape, ranks = shape_of(model), gpus - generating if off else gpus
        engine = Engine(shape, device, parallel, device.memory * 0.6)
        trainer = replace(trainer_of(model), passes=FORWARDS)
        refit = update("nccl", shape.parameters * shape.width, device, 1 + (gpus > 8), 1, parallel)
        context = (PROMPT + mean) / 2

        def iteration(running: float, engine: Engine = engine, context: float = context, mean: int = mean) -> float:
            at_once = max(1.0, min(running, engine.most_running(mean)))
            seconds = engine.iteration(at_once, context, at_once * PROMPT / SAMPLES / (mean - PROMPT))
            return seconds * max(1.0, running) / at_once

        flow = flow_of(
            Setting(
                mini_batch_size=count // SAMPLES,
                samples=SAMPLES,
                lookahead=off,
                slots=count // SAMPLES * (off + 1),
                engines=generating // parallel,
                iteration=iteration,
                tokens=mean - PROMPT,
                sigma=SIGMA,
                most_tokens=longest,
                environment_seconds=0.0,
                train_seconds=trainer.seconds(device, ranks, count * mean, mean, 16384),
                sync_seconds=refit.arrival,
                after_seconds=refit.trainer,
            )
        )
        way = f"{off} off, {generating} generate" if off else "on-policy"
        yield Row("NeMo RL", f"{version} {model}, {gpus} GPUs, {way}", seconds, flow.step_seconds)


GAINS = ((0, 1), (4, 5), (8, 9), (10, 11), (16, 17), (20, 21))
"""Rows of `STEPS` that are the same setting, on-policy and off, on as many GPUs."""


def main() -> None:
    """Print both tables and how far off the predictions are."""
    found = {"micro-batches": list(micro_batches()), "steps": list(steps())}
    for rows in found.values():
        print("| system | setting | published, s | predicted, s | factor |\n|---|---|---|---|---|")
        for row in rows:
            print(f"| {row.system} | {row.setting} | {row.seconds:.4g} | {row.predicted:.3g} | {row.factor:.2f} |")
        print(f"\nmedian factor {statistics.median(row.factor for row in rows):.2f} of {len(rows)}\n")
    every = [row.factor for rows in found.values() for row in rows]
    print(f"all: median factor {statistics.median(every):.2f} of {len(every)}\n")
    print("| setting | published gain | predicted gain | error |\n|---|---|---|---|")
    rows = found["steps"]
    for sync, off in GAINS:
        published, predicted = rows[sync].seconds / rows[off].seconds, rows[sync].predicted / rows[off].predicted
        print(f"| {rows[off].setting} | {published:.2f} | {predicted:.2f} | {predicted / published - 1:+.0%} |")


if __name__ == "__main__":
    main()
