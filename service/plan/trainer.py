"""Predicts the seconds of an optimizer step and the memory of a rank for any number of ranks. Only one number of ranks
is estimated in detail; the figures for other numbers follow from that estimate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from service.errors import UserError
from service.learn.compile import compiles_layers
from service.learn.estimate.fit import fit, is_estimable
from service.learn.estimate.gpus import GPUS_OF_A_NODE, REACHED
from service.learn.estimate.meter import ELEMENTWISE
from service.learn.estimate.step import StepEstimate, estimate_step
from service.learn.model.hf_config import read_config
from service.learn.settings import FitSettings
from service.model_folder import experts_of
from service.plan.machine.costs import CPU, GPU, TRAINER
from service.plan.machine.device import Device

ATTENTION_MEAN_RATE = 3.5 / (1 / REACHED.attention + 2.5 / REACHED.attention_backward)
"""FLOP/s of attention on an H100, forward and backward together."""
SHARDED = ("weights", "gradients", "optimizer")
"""Parts of the memory that are sharded over the ranks."""


@dataclass(frozen=True)
class Trainer:
    """An estimate of a rank's optimizer step, made for `ranks` ranks; the methods predict other numbers of ranks."""

    step: StepEstimate
    ranks: int
    """Number of ranks for which the optimizer step was estimated."""
    recomputed: float
    """Fraction of the layers that are recomputed in the backward pass. The times in `step` include the recomputation of
    all layers, or of none if this is 0."""
    fused: bool
    micro_tokens: int
    """Number of tokens that one rank has in the estimated micro-batch."""
    row_tokens: int
    """Length of the micro-batch's rows, in tokens."""
    passes: float
    """Cost of all passes over a token, relative to the estimate; above 1 if a reference policy or a proximal anchor
    adds a forward pass."""
    shards_within_node: bool = False
    """Whether each node has a copy of the policy, as with `trainer.shard_within: node`."""

    def _shards(self, ranks: int) -> int:
        """Number of ranks that share a copy of the policy."""
        return min(ranks, GPUS_OF_A_NODE) if self.shards_within_node else ranks

    def memory(self, ranks: int) -> dict[str, float]:
        """Peak bytes of memory of a rank if there are `ranks` ranks, by what they hold, such as `weights`."""
        share = self._shards(self.ranks) / self._shards(ranks)
        return {part: held * (share if part in SHARDED else 1.0) for part, held in self.step.peak.items()}

    def token_seconds(self, device: Device, row_tokens: float) -> float:
        """Seconds per token in rows of `row_tokens` tokens: the sum over all kinds of operations, each at the device's
        rate."""
        seconds, slower = dict(self.step.seconds), REACHED.bandwidth / device.bandwidth
        attention, products = seconds.pop("attention", 0.0), seconds.pop("products", 0.0)
        computed = max(0.0, self.step.flops - attention * ATTENTION_MEAN_RATE)
        moving = max(0.0, products - computed / REACHED.products)  # narrow matrices: limited by memory
        total = computed / device.products + moving * slower
        total += attention * REACHED.attention / device.attention * row_tokens / self.row_tokens
        for kind, each in seconds.items():
            total += each * slower * (REACHED.fused_passes if kind == ELEMENTWISE and self.fused else 1.0)
        again = max(0.0, 1 - self.step.model_flops / self.step.flops)  # FLOPs of all recomputed layers
        if self.recomputed < 1:
            total *= 1 - again * (1 - self.recomputed)
        gaps = GPU["kernel_gaps"] if device.cores is None else 1.0
        return total / self.micro_tokens * self.passes * gaps

    def seconds(self, device: Device, ranks: int, tokens: float, row_tokens: float, budget: int) -> float:
        """Seconds of an optimizer step of `ranks` ranks: the longer of compute and collectives, plus the optimizer.

        `tokens`: number of tokens that all ranks together train, in rows of `row_tokens`; `budget`: maximum tokens of a
        rank's micro-batch.
        """
        mine = tokens / ranks * TRAINER["imbalance"]
        micro_batches = max(1, math.ceil(mine / budget))
        compute = mine * self.token_seconds(device, row_tokens)
        collectives = micro_batches * self._collectives(device, ranks)
        share = self._shards(self.ranks) / self._shards(ranks)
        optimizer = self.step.optimizer_seconds * share * REACHED.bandwidth / device.bandwidth
        host = CPU["rank_step"] * device.pace if device.cores is not None else 0.0
        return max(compute, collectives) + optimizer + host

    def _collectives(self, device: Device, ranks: int) -> float:
        """Seconds of a micro-batch's collectives: rings over the ranks of a copy, then sums of gradients over copies.

        An estimate for a single rank has no sent bytes, so these are assumed: per parameter, weights of two bytes are
        gathered twice, and gradients of four bytes are reduced.
        """
        step, shards = self.step, self._shards(ranks)
        copies = ranks / shards
        sent = step.sent or 4.0 * (step.parameters + step.trained)
        gradients = 2 * 4.0 * step.trained / shards * (1 - 1 / copies)
        return sent * (1 - 1 / shards) / device.ring(shards) + gradients / device.network


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU of an engine: `kv` for the KV cache, `engine` for weights, graphs and buffers."""

    engine: float
    kv: float
    shared: float = 0.0
    """Bytes of an engine on the GPU of a rank, which it shares; 0 if it has its own GPU."""


def estimated(settings: FitSettings, folder: Path, device: Device) -> tuple[Trainer, Memory, str | None]:
    """Estimate the trainer and the engines' memory of a configuration: (estimate of a rank's optimizer step, memory of
    an engine, text).

    The text says why the configuration does not fit into memory, and names remedies; it is None if the configuration
    fits.

    Raises:
        UserError: the model cannot be built or run, or its step cannot be estimated.
    """
    learn, problem = settings.learn, None
    if not is_estimable(settings, folder):
        raise UserError(
            f"model.dtype: {learn.model.dtype}: no step of a mixture of experts can be estimated in it; plan with "
            "bfloat16"
        )
    setting, algorithm = learn.trainer, learn.algorithm
    if device.cores is None and learn.model.dtype == "bfloat16":
        found = fit(settings, folder, device.memory)
        step, problem = found.step, found.problem()
        if not found.checkpointing.regather:  # weights are gathered once instead of twice
            step = replace(step, sent=max(0.0, step.sent - 2.0 * step.parameters))
        automatic = setting.gradient_checkpointing == "auto"  # the times assume checkpointing of all layers
        recomputed = found.checkpointing.layers / found.n_layers if automatic else 1.0
        memory = Memory(found.engine_bytes, found.kv_bytes, found.shared_bytes)
        whole = not experts_of(read_config(folder)) and compiles_layers(setting, None, torch.bfloat16)
        fused = setting.fused_kernels or whole
    else:
        step = estimate_step(learn, folder, on_gpu=False)
        memory = Memory(0.0, float(settings.generator.kv_cache_bytes or 0))
        recomputed, fused = 1.0, False
    forwards = (algorithm.kl_coef > 0) + (algorithm.anchor == "proximal")
    rows = max(1, setting.tokens_of_micro_batch // learn.longest_row)
    mine = rows * learn.longest_row // setting.sequence_parallel
    passes, node = 1 + forwards / 4, setting.shard_within == "node"
    trainer = Trainer(step, setting.ranks, recomputed, fused, mine, learn.longest_row, passes, node)
    return trainer, memory, problem
