"""Estimates a training step: the real modules, FSDP2 and the optimizer run on fake tensors, and `Meter` counts them.

Fake CPU tensors stand for the tensors of a GPU, because a CPU build of torch has no backward pass for fake CUDA
tensors; with `as_on_gpu` they take the code paths of CUDA tensors. Layers run uncompiled and unfused, whatever is
configured. Compiled or fused layers hold less than is estimated here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from service.config.learn import TrainerConfig
from service.learn.compile import as_on_gpu
from service.learn.device_batch import unsampled_micro_batch
from service.learn.estimate.gpus import GPUS_OF_A_NODE, REACHED
from service.learn.estimate.meter import ELEMENTWISE, HOST, Meter
from service.learn.learner import Learner
from service.learn.model.hf_config import code_of_the_model, read_config
from service.learn.model.policy import Policy
from service.learn.model.policy_model import Checkpointing
from service.learn.optimizer import Optimizer
from service.learn.settings import LearnSettings
from service.types import MiniBatch, SupervisedRow

MICRO_BATCHES = 2
"""Number of micro-batches in the estimated step: during the second, the gradients of the first are in memory."""


@dataclass(frozen=True)
class StepEstimate:
    """Memory, operations and time that an optimizer step takes on one rank; `flops`, `model_flops`, `sent` and
    `seconds` are for one micro-batch."""

    parameters: int
    """Number of parameters of the whole model, including its adapter."""
    trained: int
    """Number of parameters that are trained and published: all parameters of the model, or the parameters of the
    adapter."""
    peak: Mapping[str, int]
    """Bytes of the device's memory at its peak, by part: weights, gradients, optimizer, activations, logits (with the
    gradient of the output head), gathered (layers gathered from all ranks)."""
    flops: float
    """Floating-point operations of matrix products and attention."""
    model_flops: float
    """FLOPs without recomputation: three times the FLOPs of the forward pass."""
    sent: float
    """Bytes that collectives send: gathered weights, reduced gradients, and exchanges for attention."""
    seconds: Mapping[str, float]
    """Seconds on an H100 by kind of operation, with uncompiled layers; gaps between kernels, and collectives, do not
    count."""
    optimizer_seconds: float

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the device's memory: the sum over the parts in `peak`, such as weights and activations."""
        return sum(self.peak.values())

    @property
    def fused_seconds(self) -> float:
        """Seconds of a micro-batch on an H100 with fused layers."""
        return sum(self.seconds.values()) - self.seconds[ELEMENTWISE] * (1 - REACHED.fused_passes)


def estimate_step(
    settings: LearnSettings,
    folder: Path,
    row_tokens: int | None = None,
    on_gpu: bool = True,
    checkpointing: Checkpointing | None = None,
) -> StepEstimate:
    """Estimate a training step of the model in a folder with a `config.json`; the folder needs no weights.

    Micro-batches are filled with rows of `row_tokens` tokens; None: rows as long as the generator's longest. Half of
    the tokens carry loss. `checkpointing` replaces the trainer's setting. No process group may exist yet.

    Raises:
        UserError: the model cannot be built or run.
    """
    # with rows of one length, padding takes as many slots as packing, and fake masks have no values to inspect
    plain = settings.trainer.model_copy(update={"compile": False, "fused_kernels": False, "layout": "packed"})
    settings = replace(settings, trainer=plain)
    vocab_size = read_config(folder).vocab_size
    row_tokens = row_tokens or settings.longest_row
    meter, batch = Meter(vocab_size, row_tokens), full_mini_batch(plain, vocab_size, row_tokens)
    with ExitStack() as held:
        held.enter_context(_pretended_ranks(plain))
        held.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if on_gpu:
            held.enter_context(as_on_gpu(meter.one_kernel))
        with code_of_the_model(folder):
            policy = fake_policy(settings, folder, checkpointing)
            policy.logprobs([policy.to_device(batch.ranks[0][0])])
        return _step(plain, Learner(settings, folder, policy.device, 0, plain.ranks, policy), meter, batch)


def fake_policy(settings: LearnSettings, folder: Path, checkpointing: Checkpointing | None = None) -> Policy:
    """The first rank's policy, without weights, for fake tensors."""
    ranks, device = settings.trainer.ranks, torch.device("cpu")
    # equally many ranks on each node, as `trainer.shard_within: node` requires; the real nodes are not known yet
    on_a_node = max(n for n in range(1, GPUS_OF_A_NODE + 1) if ranks % n == 0)
    nodes = [str(rank // on_a_node) for rank in range(ranks)]
    return Policy(settings, folder, device, 0, ranks, random_weights=True, nodes=nodes, checkpointing=checkpointing)


def _step(trainer: TrainerConfig, learner: Learner, meter: Meter, batch: MiniBatch) -> StepEstimate:
    policy = learner.policy
    parameters, masters = dict(policy.model.named_parameters()), policy.master_weights.tensors
    optimizer = Optimizer(policy.master_weights, trainer.betas, trainer.weight_decay)

    def on_device(part: str) -> str:
        return HOST if trainer.cpu_offload else part

    meter.mark("weights", parameters.values())
    meter.mark(on_device("weights"), masters.values())
    meter.mark(on_device("optimizer"), optimizer.moments().values())
    forward_flops = [0.0]

    def before_forward(*_: object) -> None:
        meter.mark(on_device("gradients"), (tensor.grad for tensor in (*parameters.values(), *masters.values())))
        forward_flops[0] = meter.flops

    def after_forward(*_: object) -> None:
        forward_flops[0] = meter.flops - forward_flops[0]

    policy.model.register_forward_pre_hook(before_forward)
    policy.model.register_forward_hook(after_forward)
    meter.forget()
    with meter:
        learner.accumulate(batch)
        seconds = {kind: seconds / MICRO_BATCHES for kind, seconds in meter.seconds.items()}
        flops, sent = meter.flops / MICRO_BATCHES, meter.sent / MICRO_BATCHES
        optimizer.step(trainer.lr, 2 * trainer.max_grad_norm, trainer.max_grad_norm)
    return StepEstimate(
        parameters=sum(parameter.numel() for parameter in parameters.values()),
        trained=sum(parameter.numel() for parameter in policy.master_weights.parameters.values()),
        peak=dict(meter.peak),
        flops=flops,
        model_flops=3 * forward_flops[0],
        sent=sent,
        seconds=seconds,
        optimizer_seconds=sum(meter.seconds.values()) - MICRO_BATCHES * sum(seconds.values()),
    )


@contextmanager
def _pretended_ranks(trainer: TrainerConfig) -> Iterator[None]:
    """A process group of ranks that shard, of which only rank 0 exists; its collectives do nothing."""
    if not trainer.sharded:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    dist.init_process_group("fake", rank=0, world_size=trainer.ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def full_mini_batch(trainer: TrainerConfig, vocab_size: int, row_tokens: int) -> MiniBatch:
    """A mini-batch whose micro-batches are as long as the token budget allows, with one trajectory per row."""
    rows, parts = max(1, trainer.tokens_of_micro_batch // row_tokens), trainer.batch_parts
    trajectories = np.arange(rows * MICRO_BATCHES, dtype=np.int32)
    carries_loss = np.arange(row_tokens) >= row_tokens - row_tokens // 2
    token_ids_RT = np.arange(rows * row_tokens, dtype=np.int32).reshape(rows, row_tokens) % vocab_size
    # the rows begin differently, or a layout would share them
    micro = unsampled_micro_batch([SupervisedRow(token_ids_T, carries_loss) for token_ids_T in token_ids_RT])
    micro = replace(micro, staleness_N=np.zeros_like(micro.staleness_N))
    micros = tuple(replace(micro, trajectory_of_row_R=mine) for mine in np.split(trajectories, MICRO_BATCHES))
    n_loss_tokens = parts * int(carries_loss.sum())
    return MiniBatch(
        lease=0,
        groups=(0,),
        advantage_G=np.where(trajectories % 2, 1.0, -1.0).astype(np.float32),
        return_G=np.zeros(len(trajectories)),
        loss_tokens_G=np.full(len(trajectories), n_loss_tokens, np.int64),
        rows_G=np.full(len(trajectories), parts, np.int32),
        prompt_of_trajectory_G=np.zeros(len(trajectories), np.int32),
        ranks=(micros,) * parts,
        metrics={},
    )
