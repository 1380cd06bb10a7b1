"""The trainer without Ray: one rank's share of mini-batches in, optimizer steps and weights out.

    before            log-probabilities under fixed weights, where the configuration asks for them
    for micro-batch:  forward -> loss -> backward                 (nothing waits for the device)
    then              collect sums and gradient norm -> finite? -> clip -> optimizer.step

Every rank calls the same methods in the same order; whatever decides on a branch is the same on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from service.config.tree import Config
from service.errors import RunFailed
from service.learn.checkpoint import CheckpointWriter, Facts, check_parts, read_facts, read_parts
from service.learn.device_batch import DeviceBatch, Placing, place
from service.learn.losses.objective import Known, Objective, Output
from service.learn.losses.reduction import loss_tokens
from service.learn.measure import not_finite, step_metrics
from service.learn.model.frozen import FrozenPolicies
from service.learn.model.policy import Policy
from service.learn.model.sharding import reduce_gradients
from service.learn.optimizer import Optimizer, square_norm
from service.learn.schedule import learning_rate
from service.learn.sums import Sums
from service.learn.supervised import SupervisedRow, empty_micro_batch, supervised_micro_batches
from service.types import MicroBatch, MiniBatch

WARM_START_BETAS = (0.9, 0.999)


class StepReport(NamedTuple):
    """What became of a mini-batch; the same on every rank."""

    applied: bool
    reason: str | None
    """Why no optimizer step was taken; None when it was."""
    metrics: dict[str, float]


class Learner:
    """A policy in training on one rank."""

    def __init__(
        self,
        config: Config,
        model_folder: Path | str,
        device: torch.device,
        rank: int,
        world: int,
        policy: Policy | None = None,
    ) -> None:
        """`policy`: one that is there already, instead of the one in the folder."""
        self._config = config
        self.policy = policy or Policy(config, Path(model_folder), device, rank, world)
        self._placing = Placing(
            device,
            self.policy.accumulation_dtype,
            config.algorithm.reduction,
            config.trainer.layout,
            variable_length=device.type == "cuda" and self.policy.dtype == torch.bfloat16,
        )
        self._objective = Objective(config, device, self.policy.accumulation_dtype)
        self._frozen = FrozenPolicies(config.algorithm, self.policy)
        self._optimizer = Optimizer(self.policy.masters, config.trainer.betas, config.trainer.weight_decay)
        self._warm_up: Optimizer | None = None
        self._writer = CheckpointWriter(rank, world)
        self.steps = 0
        """Optimizer steps applied so far."""

    def step(self, batch: MiniBatch) -> StepReport:
        """Exactly one optimizer step over this rank's micro-batches, or none and the reason."""
        if loss_tokens(batch) == 0:
            return StepReport(False, "no token of the mini-batch carries loss", {})
        self._warm_up = None
        with self.policy.masters.dropped_on_error():
            return self._finish(self.accumulate(batch), loss_tokens(batch))

    def accumulate(self, batch: MiniBatch) -> Sums:
        """The gradient of the mini-batch's loss, added to the parameters' gradients; what was measured on the way."""
        policy, sums = self.policy, Sums(self.policy.device, self.policy.world)
        placed = [place(micro, self._placing) for micro in self._own_share(batch)]
        known = self._known(placed)
        prepared = self._objective.prepare(batch, placed, known)
        for i, micro in enumerate(placed):
            reduce_gradients(policy.model, now=i == len(placed) - 1)
            output = Output(*policy.model(micro))
            loss = self._objective.loss(micro, known[i], prepared, output, sums)
            loss.backward()  # type: ignore[no-untyped-call]
        return sums

    def _own_share(self, batch: MiniBatch) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches: of a mini-batch of all ranks, or of one that was cut to this rank's."""
        world, n_ranks = self.policy.world, len(batch.ranks)
        if n_ranks not in (1, world):
            raise ValueError(
                f"the mini-batch is packed for {n_ranks} ranks, but {world} train: the rest of it would be left out; "
                f"form it with BatchSettings(ranks={world})"
            )
        micros = batch.ranks[self.policy.rank if n_ranks > 1 else 0]
        largest = max((int(micro.token_ids_N.max(initial=0)) for micro in micros), default=0)
        if largest >= self.policy.vocab_size:
            raise ValueError(f"token id {largest} is outside of the model's vocabulary of {self.policy.vocab_size}")
        there = sum(int(np.count_nonzero(micro.loss_mask_N)) for micro in micros)
        if world == 1 and there != loss_tokens(batch):
            raise ValueError(
                f"the mini-batch says that {loss_tokens(batch)} tokens carry loss, but its micro-batches hold {there}: "
                "one rank's share cannot be trained alone"
            )
        return micros

    def _known(self, placed: Sequence[DeviceBatch]) -> list[Known]:
        own: Sequence[Tensor | None] = [None] * len(placed)
        if self._objective.needs_own:
            own = self.policy.logprobs(placed)
        proximal = self._frozen.logprobs("proximal", placed, self.steps)
        reference = self._frozen.logprobs("reference", placed, self.steps)
        return [Known(*logprobs) for logprobs in zip(own, proximal, reference, strict=True)]

    def _finish(self, sums: Sums, n_tokens: int) -> StepReport:
        trainer, masters = self._config.trainer, self.policy.masters
        sums.add("grad_square", square_norm(masters.gradients(), self.policy.device))
        lr = learning_rate(trainer, self.steps, self._config.run.max_steps)
        metrics = step_metrics(sums.totals(), n_tokens) | {"policy/policy_lr": lr}
        reason = not_finite(metrics)
        if reason:
            masters.drop_gradients()
            return StepReport(False, reason, metrics)
        self._optimizer.step(lr, metrics["policy/grad_norm"], trainer.max_grad_norm)
        self.steps += 1
        return StepReport(True, None, metrics)

    def supervised_step(self, rows: Sequence[SupervisedRow], lr: float) -> float:
        """One step of cross-entropy on this rank's rows, before RL; the mean loss of a token over all ranks."""
        policy, trainer = self.policy, self._config.trainer
        self._warm_up = self._warm_up or Optimizer(policy.masters, WARM_START_BETAS, weight_decay=0.0)
        micros = supervised_micro_batches(rows, trainer.max_tokens_per_micro_batch)
        n_tokens, n_micros = self._agree(sum(int(micro.loss_mask_N.sum()) for micro in micros), len(micros))
        if n_tokens == 0:
            raise ValueError("no token of the supervised rows is to be learned")
        micros += [empty_micro_batch()] * (n_micros - len(micros))
        with policy.masters.dropped_on_error():
            totals = self._supervised_sums(micros, n_tokens)
            self._warm_up.step(lr, math.sqrt(totals["grad_square"]), trainer.max_grad_norm)
        return totals["loss"]

    def _supervised_sums(self, micros: Sequence[MicroBatch], n_tokens: int) -> dict[str, float]:
        """The gradient of the mean cross-entropy; the loss and the squared norm of the gradient over all ranks."""
        policy = self.policy
        sums = Sums(policy.device, policy.world)
        for number, micro in enumerate(micros, start=1):
            reduce_gradients(policy.model, now=number == len(micros))
            logprob_M, _ = policy.model(place(micro, self._placing))
            loss = -logprob_M.sum() / n_tokens
            loss.backward()
            sums.add("loss", loss)
        sums.add("grad_square", square_norm(policy.masters.gradients(), policy.device))
        totals = sums.totals()
        if not math.isfinite(totals["loss"] + totals["grad_square"]):
            raise RunFailed(
                f"supervised step: the loss is {totals['loss']} and the squared gradient norm "
                f"{totals['grad_square']}; lower model.warm_start.lr"
            )
        return totals

    def _agree(self, n_tokens: int, n_micros: int) -> tuple[int, int]:
        """Tokens of all ranks together; the most micro-batches of any rank."""
        device = self.policy.device
        sums = Sums(device, self.policy.world)
        sums.add("tokens", torch.tensor(n_tokens, device=device))
        sums.max("micros", torch.tensor([n_micros], device=device))
        totals = sums.totals()
        return int(totals["tokens"]), int(totals["micros"])

    def save(self, folder: Path, background: bool = False) -> None:
        """Write a checkpoint of this rank's part; every rank must call, and `finish_save` where it is in background.

        The learner draws no random numbers, so weights, optimizer, frozen weights and step are all there is.
        """
        facts = Facts.model_validate(
            {"steps": self.steps, "frozen": self._frozen.taken_at, "shapes": self._shapes(), "world": self.policy.world}
        )
        self._writer.start(folder, self._state(), facts)
        if not background:
            self.finish_save()

    def finish_save(self) -> None:
        """Wait until this rank's part of the last checkpoint is on disk; raises what went wrong."""
        self._writer.finish()

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint, which a group of another size may have written; every rank must call.

        Raises:
            UserError: the checkpoint is damaged, not whole or another model's; the learner is as it was.
        """
        facts = read_facts(folder)
        check_parts(folder, facts, self._shapes())
        for name, taken_at in facts.frozen.items():
            self._frozen.hold(name, taken_at)
        read_parts(folder, self._state(), facts, self.policy.rank, self.policy.world)
        self.steps = facts.steps
        self._optimizer.set_steps(self.steps)
        self.policy.masters.write_back()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.policy.masters.parameters.items()}

    def _state(self) -> dict[str, Tensor]:
        state = {f"weights/{name}": master for name, master in self.policy.masters.tensors.items()}
        state |= self._optimizer.moments()
        for kind, frozen in self._frozen.frozen.items():
            state |= {f"{kind}/{name}": tensor for name, tensor in frozen.tensors.items()}
        return state

    def weights(self) -> dict[str, Tensor] | None:
        """All weights under their Hugging Face names, on the CPU, in the model's type; None on ranks other than 0."""
        return self.policy.weights()

    def weights_on_device(self) -> dict[str, Tensor]:
        """The same on every rank's own device."""
        return self.policy.weights_on_device()

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with the weights, whole or not at all; every rank must call."""
        self.policy.export(folder)
