"""Training without Ray: takes one rank's part of each mini-batch, makes optimizer steps, returns weights.

    before            log-probabilities under fixed weights, if the configuration needs them
    for micro-batch:  forward -> loss -> backward                 (nothing waits for the device)
    then              collect sums and gradient norm -> no step if one is not finite; else clip -> optimizer.step

Every rank calls the same methods in the same order; every branch depends on values that are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from service.learn.checkpoint import (
    CheckpointMetadata,
    CheckpointWriter,
    check_parts,
    read_metadata,
    read_parts,
    written,
)
from service.learn.device_batch import DeviceBatch
from service.learn.losses.objective import FixedLogprobs, Objective
from service.learn.losses.step_metrics import Sums, not_finite, step_metrics
from service.learn.model.optimizer import Optimizer, learning_rate, square_norm
from service.learn.model.policy import FrozenWeights, Policy
from service.learn.settings import LearnSettings
from service.types import MicroBatch, MiniBatch


class StepReport(NamedTuple):
    """The result of training on a mini-batch; equal on every rank."""

    applied: bool
    reason: str | None
    """The reason why no optimizer step was taken; None if a step was taken."""
    metrics: dict[str, float]


class Learner:
    """Trains the policy on one rank."""

    def __init__(
        self,
        settings: LearnSettings,
        model_folder: Path | str,
        device: torch.device,
        rank: int,
        world_size: int,
        policy: Policy | None = None,
    ) -> None:
        """`policy`: the policy to train; None: load the policy from `model_folder`."""
        self._trainer, self._max_steps = settings.trainer, settings.max_steps
        self.policy = policy or Policy(settings, Path(model_folder), device, rank, world_size)
        self._objective = Objective(settings, device, self.policy.accumulation_dtype, self.policy.slice.group)
        self._frozen = FrozenWeights(settings.algorithm, self.policy)
        self._optimizer = Optimizer(self.policy.master_weights, self._trainer.betas, self._trainer.weight_decay)
        self.writer = CheckpointWriter(self.policy.shard, self.policy.n_shards)
        self.began: Callable[[str], None] = lambda part: None
        """Called with `optimizer` when the gradient is complete and the optimizer step begins."""
        self.steps = 0
        """Number of optimizer steps applied so far."""

    def step(self, batch: MiniBatch) -> StepReport:
        """Take one optimizer step on this rank's micro-batches. No step is taken if no token carries loss, or if the
        loss or the gradient is not finite.

        Raises:
            OutOfMemory: the device has too little memory; the learner cannot continue.
        """
        n_tokens = int(batch.loss_tokens_G.sum())
        if n_tokens == 0:
            return StepReport(False, "no token of the mini-batch carries loss", {})
        with self.policy.gradients_dropped_on_error():
            return self._apply(self.accumulate(batch), n_tokens)

    def accumulate(self, batch: MiniBatch) -> Sums:
        """Add the gradient of the mini-batch's loss to the parameters' gradients; returns the sums for the metrics."""
        policy = self.policy
        sums = Sums(policy.device, policy.world_size)
        micros = [policy.to_device(micro) for micro in self._own_part(batch)]
        fixed = self._fixed_logprobs(micros)
        inputs = self._objective.prepare(batch, micros, fixed)
        for i, micro in enumerate(micros):
            loss = self._objective.loss(micro, fixed[i], inputs, policy.model(micro), sums)
            loss.backward()  # type: ignore[no-untyped-call]
        return sums

    def _own_part(self, batch: MiniBatch) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches, from a whole mini-batch or from a mini-batch with only this rank's part."""
        n_parts, n_ranks = self.policy.n_batch_parts, len(batch.ranks)
        if n_ranks not in (1, n_parts):
            raise ValueError(
                f"the mini-batch is packed for {n_ranks} ranks, but {n_parts} train: the rest of it would be left "
                f"out; form it with BatchSettings(ranks={n_parts})"
            )
        micros = batch.ranks[self.policy.batch_part if n_ranks > 1 else 0]
        largest = max((int(micro.token_ids_N.max(initial=0)) for micro in micros), default=0)
        if largest >= self.policy.vocab_size:
            raise ValueError(f"token id {largest} is outside of the model's vocabulary of {self.policy.vocab_size}")
        return micros

    def _fixed_logprobs(self, micros: Sequence[DeviceBatch]) -> list[FixedLogprobs]:
        current: Sequence[Tensor | None] = [None] * len(micros)
        if self._objective.needs_current:
            current = self.policy.logprobs(micros)
        proximal = self._frozen.logprobs("proximal", micros, self.steps)
        reference = self._frozen.logprobs("reference", micros, self.steps)
        return [FixedLogprobs(*logprobs) for logprobs in zip(current, proximal, reference, strict=True)]

    def _apply(self, sums: Sums, n_tokens: int) -> StepReport:
        master_weights = self.policy.master_weights
        sums.add("grad_square", square_norm(master_weights.gradients(), self.policy.device) / self.policy.n_copies)
        lr = learning_rate(self._trainer, self.steps, self._max_steps)
        metrics = step_metrics(sums.totals(), n_tokens) | {"policy/policy_lr": lr}
        reason = not_finite(metrics)
        if reason:
            master_weights.drop_gradients()
            return StepReport(False, reason, metrics)
        self.began("optimizer")
        self._optimizer.step(lr, metrics["policy/grad_norm"], self._trainer.max_grad_norm)
        self.steps += 1
        return StepReport(True, None, metrics)

    def save(self, folder: Path, background: bool = False) -> None:
        """Write this rank's part of a checkpoint, in the background until `writer` has finished; every rank must call
        this.

        The learner draws no random numbers, so weights, optimizer, frozen weights and step are the whole state.
        """
        policy = self.policy
        metadata = CheckpointMetadata.model_validate(
            {"steps": self.steps, "frozen": self._frozen.taken_at, "shapes": self._shapes(), "base": policy.base}
            | {"alpha": policy.alpha, "world_size": policy.n_shards}
        )
        if policy.copy > 0:
            return  # the ranks of the first copy write the same rows
        self.writer.start(folder, self._state(), metadata)
        if not background:
            self.writer.finish()

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint, which another number of ranks may have written; every rank must call this.

        Raises:
            UserError: the checkpoint is damaged, incomplete or of another model; the learner is unchanged.
        """
        metadata = read_metadata(folder)
        check_parts(folder, metadata, self._shapes(), self.policy.base, self.policy.alpha)
        for kind, taken_at in metadata.frozen.items():
            self._frozen.take(kind, taken_at)
        read_parts(folder, self._state(), metadata, self.policy.shard, self.policy.n_shards)
        self.steps = metadata.steps
        self._optimizer.set_steps(self.steps)
        self.policy.master_weights.write_back()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.policy.master_weights.parameters.items()}

    def _state(self) -> dict[str, Tensor]:
        """This rank's tensors for a checkpoint, by `kind/name`."""
        state = {f"weights/{name}": master for name, master in self.policy.master_weights.tensors.items()}
        state |= self._optimizer.moments()
        for kind, copies in self._frozen.copies.items():
            state |= {f"{kind}/{name}": tensor for name, tensor in copies.items()}
        return state

    def export(self, folder: Path) -> None:
        """Write the final weights to a folder; every rank must call this. Details: `Policy.export`."""
        with written(folder):
            self.policy.export(folder)
