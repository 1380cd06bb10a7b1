"""Training steps of the learner from random weights. Micro-batches are full and have rows of one length, and half of
the tokens carry loss, as in the estimates."""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.learn import made_row, micro_batch_of, mini_batch_of
from benchmarks.shapes import shape_folder
from service.config.learn import TrainerConfig
from service.config.rollout import GeneratorConfig
from service.config.tree import Config
from service.learn.learner import Learner
from service.learn.model.policy import Policy
from service.learn.model.policy_model import Checkpointing
from service.learn.trial import take_trial
from service.plan.memory import GPUS, FitSettings, fit
from service.types import MiniBatch

MICRO_BATCHES = 2
ROW_TOKENS = {"cuda": 2048, "cpu": 16}
TOKENS = {"cuda": 16384, "cpu": 64}
"""Tokens of a micro-batch."""
REPEATS = {"cuda": 4, "cpu": 1}
"""The number of timed steps, after two warm-up steps."""
CALLS = {"cuda": 10, "cpu": 1}
"""The number of timed calls of a function, after two warm-up calls."""
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "head_dim": 8, "vocab_size": 500}
TINY |= {"num_key_value_heads": 4}


def shape_on(device: str, shape: dict[str, Any], layers: int | None = None) -> dict[str, Any]:
    """The shape with this number of layers; on a CPU a tiny shape of the same family."""
    if device == "cuda":
        return shape | ({} if layers is None else {"num_hidden_layers": layers})
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if "num_experts" in shape else {}
    return shape | TINY | few | {"num_hidden_layers": 2}


def configured(row_tokens: int, tokens: int, **trainer: Any) -> FitSettings:
    """The settings of one rank."""
    generator = GeneratorConfig(max_input_length=row_tokens // 2, max_generate_length=row_tokens // 2)
    trainer = {"ranks": 1, "max_tokens_per_micro_batch": tokens, **trainer}
    return FitSettings.of(Config(generator=generator, trainer=TrainerConfig(**trainer)))


@dataclass
class Trained:
    """A learner after its steps, with what was measured."""

    learner: Learner
    """The learner; deleted when the block ends."""
    batch: MiniBatch
    first_seconds: float
    seconds: float
    """Median of the timed steps."""
    peak_bytes: float
    estimated_bytes: float
    checkpointing: Checkpointing
    trial_seconds: float

    @property
    def note(self) -> str:
        """Which activations are recomputed, in words."""
        level = self.checkpointing
        return f"{level.layers} layers checkpointed" + ", elementwise results" * level.elementwise


@contextmanager
def trained(
    device: torch.device,
    shape: dict[str, Any],
    checkpointing: Checkpointing | None = None,
    sharded: bool = False,
    trial: bool = False,
    **trainer: Any,
) -> Iterator[Trained]:
    """Take the steps, with this checkpointing or with what `auto` chooses on this GPU; frees the memory afterwards.
    `sharded`: shard the policy over a mesh of one rank; `trial`: take the trial of a starting rank first."""
    settings = configured(ROW_TOKENS[device.type], TOKENS[device.type], **trainer)
    learn = settings.learn
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as ranks have it
    held = None
    try:
        with tempfile.TemporaryDirectory() as parent:
            folder, on_gpu = shape_folder(shape, Path(parent)), device.type == "cuda"
            gpu_bytes = torch.cuda.get_device_properties(device).total_memory if on_gpu else GPUS["h100"].memory
            estimated = 0.0
            if checkpointing is None:
                found = fit(settings, folder, float(gpu_bytes))
                checkpointing, estimated = found.checkpointing, found.rank_bytes
            if sharded:
                store = dist.HashStore()
                dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
            policy = Policy(
                learn, folder, device, 0, 1, random_weights=True, checkpointing=checkpointing, sharded=sharded
            )
            tried = timed(device, partial(take_trial, learn, policy)) if trial else 0.0
            learner = Learner(learn, folder, device, 0, 1, policy)
        batch = full_mini_batch(learn.trainer, shape["vocab_size"], ROW_TOKENS[device.type])
        first, _ = (timed(device, partial(take_step, learner, batch)) for _ in range(2))
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = [timed(device, partial(take_step, learner, batch)) for _ in range(REPEATS[device.type])]
        peak = torch.cuda.max_memory_reserved() if on_gpu else 0
        held = Trained(learner, batch, first, statistics.median(seconds), float(peak), estimated, checkpointing, tried)
        yield held
    finally:
        if held is not None:
            del held.learner  # the caller may keep the other fields until the next steps
        policy = learner = None  # type: ignore[assignment]
        if dist.is_initialized():
            dist.destroy_process_group()
        torch._dynamo.reset()
        gc.collect()  # a learner and its compiled layers refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()


def full_mini_batch(trainer: TrainerConfig, vocab_size: int, row_tokens: int) -> MiniBatch:
    """A mini-batch whose micro-batches are as long as the token budget allows, with one trajectory per row."""
    rows = max(1, trainer.tokens_of_micro_batch // row_tokens)
    # the rows begin differently, or a layout would share them
    token_ids_RT = np.arange(rows * row_tokens).reshape(rows, row_tokens) % vocab_size
    made = [made_row(token_ids_T, row_tokens - row_tokens // 2) for token_ids_T in token_ids_RT]
    firsts = range(0, rows * MICRO_BATCHES, rows)
    return mini_batch_of([micro_batch_of(made, range(first, first + rows)) for first in firsts], rows * MICRO_BATCHES)


def take_step(learner: Learner, batch: MiniBatch) -> None:
    """Take one step.

    Raises:
        RuntimeError: the step was not applied.
    """
    report = learner.step(batch)
    if not report.applied:
        raise RuntimeError(f"the step was not applied: {report.reason}")


def seconds_of(device: torch.device, function: Callable[[], object]) -> float:
    """Mean seconds of several calls, after two warm-up calls."""
    for _ in range(2):
        function()
    calls = CALLS[device.type]
    return timed(device, lambda: [function() for _ in range(calls)]) / calls


def timed(device: torch.device, function: Callable[[], object]) -> float:
    """Seconds of one call, until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
