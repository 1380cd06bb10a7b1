"""The trial when the ranks load: the largest micro-batches that the settings allow, forward and backward.

It shows whether the level of gradient checkpointing leaves enough memory, before a mini-batch is leased; and it makes
every graph of compiled layers, before the deadline of a step counts:

    layout                                        forward and backward, as in a step
    packed rows                                   one graph for all numbers of rows and tokens
    rows that share a prefix                      another graph
    both without a backward pass                  another graph each, for measurements and frozen weights

If memory runs out, all ranks restart with the next level of gradient checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from service.config.learn import TrainerConfig
from service.handoff.batches.pack import MIN_SHARED
from service.learn.device_batch import unsampled_micro_batch
from service.learn.learner import Learner
from service.learn.model.optimizer import Optimizer
from service.learn.model.policy import Policy
from service.learn.settings import LearnSettings
from service.types import MicroBatch, MiniBatch, SupervisedRow

MARGIN = 0.05
"""Fraction of a GPU's memory that the trial leaves free for buffers of collectives and fragmentation."""
AMPLE_MARGIN = 0.15
"""Fraction of a GPU's memory that stays free if gathered weights are kept for the backward pass."""
ENGINE_BYTES = 3e9
"""Bytes that an engine needs for CUDA graphs and buffers, besides its weights and its KV cache."""


def take_trial(settings: LearnSettings, policy: Policy, elsewhere: float = 0) -> None:
    """Compute the largest micro-batches and drop their gradients; every rank must call this, before its first step.

    `elsewhere`: bytes of this GPU that other processes will use, or this process between steps.

    Raises:
        OutOfMemory: the device has too little memory; the policy cannot be used any more.
    """
    device, masters = policy.device, policy.master_weights
    batch = largest_mini_batch(settings.trainer, policy.vocab_size, settings.longest_row)
    with policy.gradients_dropped_on_error(), _limited(device, elsewhere):
        moments = Optimizer(masters, settings.trainer.betas, settings.trainer.weight_decay).moments()
        # a separate learner, because the policy's learner copies its frozen weights later
        Learner(settings, Path(), device, policy.rank, policy.world_size, policy).accumulate(batch)
        masters.drop_gradients()
        if policy.compiles:
            policy.logprobs([policy.to_device(micro) for micro in batch.ranks[0][:2]])
        del moments
    if device.type == "cuda":
        torch.cuda.empty_cache()


def engine_bytes(policy: Policy, kv_cache_bytes: int) -> float:
    """Bytes of a GPU that an engine needs, including the copy of the weights while it loads them."""
    trained = policy.master_weights.parameters.values()
    copies = sum(map(torch.numel, policy.model.parameters())) + sum(map(torch.numel, trained))
    return copies * policy.dtype.itemsize + kv_cache_bytes + ENGINE_BYTES


def keep_gathered_weights(policy: Policy, elsewhere: float = 0) -> None:
    """Keep gathered weights for the backward pass if ample memory is left for them on every rank; every rank must call
    this, after its trial. `elsewhere`: as in `take_trial`."""
    weights = sum(map(torch.numel, policy.model.parameters())) * policy.dtype.itemsize
    ample = free_bytes(policy.device, AMPLE_MARGIN) - elsewhere >= weights
    everywhere = torch.tensor(int(ample), device=policy.device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    if everywhere.item():
        policy.keep_gathered_weights()


def free_bytes(device: torch.device, margin: float) -> float:
    """Bytes of the device beyond the peak that this process has reserved so far, minus the fraction `margin` of all its
    bytes; 0 on a CPU."""
    if device.type == "cpu":
        return 0.0
    total = torch.cuda.get_device_properties(device).total_memory
    return total * (1 - margin) - torch.cuda.max_memory_reserved(device)


@contextmanager
def _limited(device: torch.device, elsewhere: float) -> Iterator[None]:
    """Within the block, this process gets only the part of its GPU's memory that it can also use during training."""
    if device.type == "cpu":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(max(0.0, 1 - MARGIN - elsewhere / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def largest_mini_batch(trainer: TrainerConfig, vocab_size: int, longest_row: int) -> MiniBatch:
    """A mini-batch of full micro-batches: packed rows, rows that share a prefix if the layout allows it, packed rows
    again. During the last micro-batch the gradients of the others are in memory. Every rank gets the same one."""
    budget = trainer.tokens_of_micro_batch
    length = max(2, min(longest_row, budget))
    shapes = [(max(1, budget // length), length, 0)] * 2
    length = min(longest_row, budget * 2 // 3)
    shared = max(length // 2, MIN_SHARED)
    if trainer.layout in ("auto", "shared_prefix") and shared < length:
        shapes.insert(1, (1 + (budget - length) // (length - shared), length, shared))
    first_rows = np.cumsum([0, *(rows for rows, *_ in shapes)])
    micros = [_rows(*shape, int(first), vocab_size) for shape, first in zip(shapes, first_rows[:-1], strict=True)]
    tokens_R = np.concatenate([np.add.reduceat(micro.loss_mask_N, micro.offsets_R[:-1]) for micro in micros])
    return MiniBatch(
        lease=0,
        groups=(0,),
        advantage_G=np.where(np.arange(len(tokens_R)) % 2, 1.0, -1.0).astype(np.float32),
        return_G=np.zeros(len(tokens_R)),
        loss_tokens_G=tokens_R.astype(np.int64),
        rows_G=np.ones(len(tokens_R), np.int32),
        prompt_of_trajectory_G=np.zeros(len(tokens_R), np.int32),
        ranks=(tuple(micros),),
        metrics={},
    )


def _rows(number: int, length: int, shared: int, trajectory: int, vocab_size: int) -> MicroBatch:
    """A micro-batch of rows, each of a trajectory of its own from number `trajectory` on. They share their
    first `shared` tokens. All later tokens carry loss, except the first token of a row."""
    position_L = np.arange(length, dtype=np.int32)
    carries_loss_L = position_L >= max(1, shared)
    token_ids_RL = (position_L + np.where(position_L < shared, 0, np.arange(number)[:, None])) % vocab_size
    micro = unsampled_micro_batch(
        [SupervisedRow(token_ids_L.astype(np.int32), carries_loss_L) for token_ids_L in token_ids_RL]
    )
    return replace(
        micro,
        staleness_N=np.zeros_like(micro.staleness_N),
        trajectory_of_row_R=np.arange(trajectory, trajectory + number, dtype=np.int32),
    )
