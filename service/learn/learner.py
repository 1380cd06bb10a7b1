"""The trainer without Ray: one rank's share of mini-batches in, optimizer steps and weights out.

    for micro-batch:  place -> forward -> loss -> backward        (nothing waits for the device)
    then              collect sums and gradient norm -> finite? -> clip -> optimizer.step

Every rank calls the same methods in the same order; whatever decides on a branch is the same on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from service.config.tree import Config
from service.learn.broadcast import broadcast
from service.learn.files import load_weights, write_folder
from service.learn.logprob import wide
from service.learn.loss import Tokens, loss_named, safe_exp
from service.learn.masters import Masters
from service.learn.model import PolicyModel, allocate, empty_model, read_config
from service.learn.optimizer import Optimizer, square_norm
from service.learn.place import Placed, place
from service.learn.reduction import loss_tokens, trajectory_weights
from service.learn.sharding import reduce_gradients, shard
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


class _Scalars(NamedTuple):
    """What the loss needs of each trajectory, on the device."""

    advantage_G: Tensor
    weight_G: Tensor


class Learner:
    """A policy in training: model, optimizer and schedule of one rank."""

    def __init__(self, config: Config, model_folder: Path, device: torch.device, rank: int, world: int) -> None:
        self._config = config
        self._folder = model_folder
        self._device = device
        self._rank = rank
        self._world = world
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._wide = wide(self._dtype)
        self._loss = loss_named(config.algorithm.loss)
        self.model = self._load()
        self._optimizer = Optimizer(self._masters, config.trainer.betas, config.trainer.weight_decay)
        self._warm_up: Optimizer | None = None
        self._steps = 0

    def _load(self) -> PolicyModel:
        hf_config = read_config(self._folder)
        held = self._dtype if self._world == 1 else self._wide
        model = empty_model(hf_config, held, self._config.trainer.gradient_checkpointing)
        if self._world > 1:
            shard(model, self._device, self._world, self._dtype)
        allocate(model, hf_config, self._device)
        self._masters = Masters(model)
        load_weights(self._folder, self._masters.tensors, self._masters.parameters)
        self._masters.write_back()
        return model

    def step(self, batch: MiniBatch) -> StepReport:
        """Exactly one optimizer step over this rank's micro-batches, or none and the reason."""
        if loss_tokens(batch) == 0:
            return StepReport(False, "no token of the mini-batch carries loss", {})
        self._warm_up = None
        return self._finish(self.accumulate(batch), loss_tokens(batch))

    def accumulate(self, batch: MiniBatch) -> Sums:
        """The gradient of the mini-batch's loss, added to the parameters' gradients; what was measured on the way."""
        scalars = self._scalars(batch)
        sums = Sums(self._device, self._world)
        micros = batch.ranks[self._rank if len(batch.ranks) > 1 else 0]
        for number, micro in enumerate(micros, start=1):
            reduce_gradients(self.model, now=number == len(micros))
            self._backward(micro, scalars, sums)
        return sums

    def _scalars(self, batch: MiniBatch) -> _Scalars:
        algorithm, generator = self._config.algorithm, self._config.generator
        norm_tokens = algorithm.norm_tokens or generator.max_input_length + generator.max_generate_length
        weight_G = trajectory_weights(batch, algorithm.reduction, norm_tokens)
        both = torch.tensor([batch.advantage_G.tolist(), weight_G.tolist()], dtype=torch.float64)
        advantage, weight = both.to(self._device, self._wide)
        return _Scalars(advantage, weight)

    def _backward(self, micro: MicroBatch, scalars: _Scalars, sums: Sums) -> None:
        placed = place(micro, self._device, self._wide, self._config.algorithm.reduction)
        logprob_M, entropy_M = self.model(placed)
        advantage_M = _of_loss_tokens(scalars.advantage_G, placed)
        weight_M = _of_loss_tokens(scalars.weight_G, placed) * placed.of_token(placed.share_R)
        terms = self._loss(Tokens(logprob_M, placed.rollout_M, advantage_M), self._config.algorithm)
        term_M = terms.loss_M - self._config.algorithm.entropy_coef * entropy_M
        loss = (weight_M * term_M).sum()
        loss.backward()
        sums.add("loss", loss)
        sums.add("loss_size", (weight_M * term_M.detach().abs()).sum())
        sums.add("entropy", entropy_M.sum())
        sums.add("clipped", terms.clipped_M.sum())
        _add_ratios(sums, (logprob_M - placed.rollout_M).detach())

    def _finish(self, sums: Sums, n_tokens: int) -> StepReport:
        sums.add("grad_square", square_norm(self._masters.gradients(), self._device))
        totals = sums.totals()
        lr = self._learning_rate()
        metrics = _metrics(totals, n_tokens) | {"policy/policy_lr": lr}
        reason = _not_finite(metrics)
        if reason:
            self._masters.drop_gradients()
            return StepReport(False, reason, metrics)
        self._optimizer.step(lr, metrics["policy/grad_norm"], self._config.trainer.max_grad_norm)
        self._steps += 1
        return StepReport(True, None, metrics)

    def _learning_rate(self) -> float:
        trainer = self._config.trainer
        return trainer.lr * min(1.0, (self._steps + 1) / max(1, trainer.warmup_steps))

    def supervised_step(self, rows: Sequence[SupervisedRow], lr: float) -> float:
        """One step of cross-entropy on this rank's rows, before RL; the mean loss of a token over all ranks."""
        self._warm_up = self._warm_up or Optimizer(self._masters, WARM_START_BETAS, weight_decay=0.0)
        micros = supervised_micro_batches(rows, self._config.trainer.max_tokens_per_micro_batch)
        n_tokens, n_micros = self._agree(sum(int(micro.loss_mask_N.sum()) for micro in micros), len(micros))
        if n_tokens == 0:
            raise ValueError("no token of the supervised rows is to be learned")
        micros += [empty_micro_batch()] * (n_micros - len(micros))
        sums = Sums(self._device, self._world)
        for number, micro in enumerate(micros, start=1):
            reduce_gradients(self.model, now=number == n_micros)
            logprob_M, _ = self.model(place(micro, self._device, self._wide))
            loss = -logprob_M.sum() / n_tokens
            loss.backward()
            sums.add("loss", loss)
        sums.add("grad_square", square_norm(self._masters.gradients(), self._device))
        totals = sums.totals()
        self._warm_up.step(lr, math.sqrt(totals["grad_square"]), self._config.trainer.max_grad_norm)
        return totals["loss"]

    def _agree(self, n_tokens: int, n_micros: int) -> tuple[int, int]:
        """Tokens of all ranks together; the most micro-batches of any rank."""
        sums = Sums(self._device, self._world)
        sums.add("tokens", torch.tensor(n_tokens, device=self._device))
        sums.most("micros", torch.tensor([n_micros], device=self._device))
        totals = sums.totals()
        return int(totals["tokens"]), int(totals["micros"])

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor] | None:
        """All weights under their Hugging Face names, on the CPU, in the model's type; None on ranks other than 0."""
        whole = {name: self._whole(parameter) for name, parameter in self._masters.parameters.items()}
        return whole if self._rank == 0 else None

    def _whole(self, parameter: Tensor) -> Tensor:
        cast = parameter.detach().to(self._dtype)
        whole = cast.full_tensor() if isinstance(cast, DTensor) else cast
        # a copy: training goes on while the weights travel
        return whole.to("cpu", copy=True) if self._rank == 0 else whole[:0]

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with the weights, whole or not at all; every rank must call."""
        whole = self.weights()
        if whole is not None:
            write_folder(folder, self._folder, whole)
        if self._world > 1:
            dist.barrier()


def _of_loss_tokens(value_G: Tensor, placed: Placed) -> Tensor:
    value_N = broadcast(value_G, placed.trajectory_of_row_R, placed.row_of_token_N, placed.loss_mask_N)
    return value_N.index_select(0, placed.loss_token_M)


def _add_ratios(sums: Sums, log_ratio_M: Tensor) -> None:
    """How far the trained policy is from the one that sampled."""
    ratio_M = safe_exp(log_ratio_M)
    sums.add("ratio", ratio_M.sum())
    sums.add("ratio_square", ratio_M.square().sum())
    sums.add("kl", (ratio_M - 1 - log_ratio_M).sum())
    sums.most("ratio_max", ratio_M)


def _metrics(totals: dict[str, float], n_tokens: int) -> dict[str, float]:
    mean = totals["ratio"] / n_tokens
    return {
        "policy/policy_loss": totals["loss"],
        "policy/policy_entropy": totals["entropy"] / n_tokens,
        "policy/policy_kl": totals["kl"] / n_tokens,
        "policy/is_ratio_mean": mean,
        "policy/is_ratio_std": _root(totals["ratio_square"] / n_tokens - mean * mean),
        "policy/is_ratio_max": totals["ratio_max"],
        "policy/loss_metrics/clip_ratio": totals["clipped"] / n_tokens,
        "policy/grad_norm": _root(totals["grad_square"]),
    }


def _root(square: float) -> float:
    """Square root; rounding may leave a variance a hair below 0, and NaN stays NaN."""
    return math.sqrt(square) if not square < 0 else 0.0


def _not_finite(metrics: dict[str, float]) -> str | None:
    for name in ("policy/policy_loss", "policy/grad_norm"):
        if not math.isfinite(metrics[name]):
            return f"{name} is {metrics[name]}"
    return None
