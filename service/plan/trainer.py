"""How long a step of the trainer takes, and what a rank holds, for any number of ranks from one estimate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from service.config.tree import Config
from service.learn.compile import compiles_layers
from service.learn.estimate.fit import fit
from service.learn.estimate.kv_cache import kv_token_bytes, longest_row
from service.learn.estimate.meter import (
    ATTENTION_BACKWARD_RATE,
    ATTENTION_RATE,
    BANDWIDTH,
    ELEMENTWISE,
    PRODUCT_RATE,
)
from service.learn.estimate.step import FUSED_PASSES, GPUS_OF_A_NODE, StepEstimate, estimate_step
from service.learn.model.hf_config import read_config
from service.plan.machine.device import Device
from service.plan.machine.host import RANK_STEP

ATTENTION_MEAN_RATE = 3.5 / (1 / ATTENTION_RATE + 2.5 / ATTENTION_BACKWARD_RATE)
"""FLOP/s of attention on an H100, forward and backward together."""

SHARDED = ("weights", "gradients", "optimizer")
"""Parts of a rank's memory of which each rank holds a part."""
IMBALANCE = 1.05
"""Cost of the most loaded rank over the mean; assumed."""
KERNEL_GAPS = 1.1
"""Time of a micro-batch with the gaps between its kernels, over that of its operations; assumed."""


@dataclass(frozen=True)
class Trainer:
    """What an estimate of a rank's step says, without its number of ranks."""

    step: StepEstimate
    ranks: int
    """Ranks of the estimate."""
    recomputed: float
    """Fraction of the layers that are computed again in the backward pass; the step's times are with all of them, or
    with none where that is 0."""
    fused: bool
    micro_tokens: int
    """Tokens of an estimated micro-batch on a rank."""
    row_tokens: int
    """Length of its rows."""
    passes: float
    """Forward and backward passes of a token, over those of the estimate: a reference policy adds a forward pass."""

    def memory(self, ranks: int) -> dict[str, float]:
        """Bytes that a rank holds at most, by part, with so many ranks."""
        return {part: held * (self.ranks / ranks if part in SHARDED else 1.0) for part, held in self.step.peak.items()}

    def token_seconds(self, device: Device, row_tokens: float) -> float:
        """Seconds of a token in rows of this length: each kind of operation at the device's rate."""
        seconds, slower = dict(self.step.seconds), BANDWIDTH / device.bandwidth
        attention, products = seconds.pop("attention", 0.0), seconds.pop("products", 0.0)
        computed = max(0.0, self.step.flops - attention * ATTENTION_MEAN_RATE)
        moving = max(0.0, products - computed / PRODUCT_RATE)  # products of narrow matrices wait for the memory
        total = computed / device.products + moving * slower
        total += attention * ATTENTION_RATE / device.attention * row_tokens / self.row_tokens
        for kind, each in seconds.items():
            total += each * slower * (FUSED_PASSES if kind == ELEMENTWISE and self.fused else 1.0)
        again = max(0.0, 1 - self.step.model_flops / self.step.flops)  # of all layers that are computed again
        if self.recomputed < 1:
            total *= 1 - again * (1 - self.recomputed)
        gaps = KERNEL_GAPS if device.cores is None else 1.0
        return total / self.micro_tokens * self.passes * gaps

    def seconds(self, device: Device, ranks: int, tokens: float, row_tokens: float, budget: int) -> float:
        """Seconds of a step with so many tokens: compute, or collectives where they take longer, then the optimizer."""
        mine = tokens / ranks * IMBALANCE
        micro_batches = max(1, math.ceil(mine / budget))
        compute = mine * self.token_seconds(device, row_tokens)
        rate = device.link if ranks <= GPUS_OF_A_NODE else device.network
        collectives = micro_batches * self.step.sent / rate if ranks > 1 else 0.0
        optimizer = self.step.optimizer_seconds * self.ranks / ranks * BANDWIDTH / device.bandwidth
        host = RANK_STEP * device.pace if device.cores is not None else 0.0
        return max(compute, collectives) + optimizer + host


@dataclass(frozen=True)
class Memory:
    """Bytes on a GPU of an engine."""

    engine: float
    kv: float
    kv_token: int
    longest: int


def estimated(config: Config, folder: Path, device: Device) -> tuple[Trainer, Memory, str | None]:
    """The trainer and the engine's memory of a configuration, and why it does not fit, with what would help.

    Raises:
        UserError: the model cannot be made or run.
    """
    hf, longest, problem = read_config(folder), longest_row(config), None
    rows = max(1, config.trainer.tokens_of_micro_batch // longest)
    if device.cores is None and config.model.dtype == "bfloat16":
        found = fit(config, folder, device.memory)
        step, problem = found.step, found.problem()
        layers, every = found.checkpointing.layers, found.n_layers
        automatic = config.trainer.gradient_checkpointing == "auto"
        recomputed = layers / every if automatic else 1.0  # the times of `auto` are those with all layers
        memory = Memory(found.engine_bytes, found.kv_bytes, found.kv_token_bytes, found.longest)
        fused = config.trainer.fused_kernels or compiles_layers(hf, config.trainer, None, _dtype(config))
    else:
        step = estimate_step(config, folder, on_gpu=False)
        kv = config.generator.kv_cache_bytes or 0
        memory = Memory(0.0, float(kv), kv_token_bytes(hf, config), longest)
        recomputed, fused = 1.0, False
    algorithm = config.algorithm
    forwards = (algorithm.kl_coef > 0) + (algorithm.anchor == "proximal")
    mine = rows * longest // config.trainer.sequence_parallel
    trainer = Trainer(step, config.trainer.ranks, recomputed, fused, mine, longest, 1 + forwards / 4)
    return trainer, memory, problem


def _dtype(config: Config) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    return dtype
