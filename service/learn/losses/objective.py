"""Computes the loss of a mini-batch, one micro-batch at a time.

    sum over loss tokens of  weight * (correction * policy term + kl_coef * KL + teacher term - entropy_coef * entropy)

The correction applies to the policy term only. `weight` is known before the first micro-batch, from counts over the
whole mini-batch on all ranks, so the loss does not depend on how a trajectory was cut into rows, packed or sharded:

| reduction | weight of a loss token of trajectory g |
|---|---|
| token_mean | 1 / loss tokens of the mini-batch |
| trajectory_mean | 1 / (trajectories * loss tokens of g) |
| prompt_mean | 1 / (prompts * loss tokens of g's prompt) |
| seq_mean_token_sum_norm | 1 / (trajectories * constant) |

A trajectory (or prompt) without loss tokens counts in these denominators, and contributes 0 to the mean.

Sources: token_mean: Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.3; trajectory_mean (a mean over outputs, each
divided by its length): Shao et al. 2024 (GRPO), arXiv:2402.03300; a constant norm: Liu et al. 2025 (Dr. GRPO),
arXiv:2503.20783.

Each token has two probability ratios:

| | ratio of the policy term | ratio of the correction |
|---|---|---|
| `anchor: rollout` | trained policy / rollout | trained policy / rollout |
| `anchor: proximal` | trained policy / frozen weights | frozen weights / rollout |

The teacher's term is on-policy distillation.

Log-probabilities of a sampled token: T under the teacher, R under the rollout policy, P under the trained policy.

| mode | term |
|---|---|
| `advantage` | `coef * (T - R)`, added to the token's advantage |
| `kl` | `coef` times an estimate of KL(policy, teacher), added to the loss; estimator `algorithm.kl_estimator` |

With fresh samples and no clipping, `advantage` gives the gradient of the reverse KL divergence: the mean of
`gradient of P * (P - T)` over samples of the policy (Schulman 2020; on-policy distillation: Agarwal et al. 2023,
arXiv:2306.13649). For a token without a teacher (NaN) the term is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from service.config.learn import TeacherConfig
from service.learn.attention_layout import to_device
from service.learn.device_batch import DeviceBatch
from service.learn.losses.correction import TrajectoryRatios, correct, over_trajectory, trajectory_ratios
from service.learn.losses.policy_losses import LossInputs, LossTerms, check_terms, kl_term, loss_named
from service.learn.losses.step_metrics import RatioMetrics, Sums, rounding
from service.learn.model.logprob import TokenLogprobs
from service.learn.settings import LearnSettings
from service.types import Float64s, MiniBatch


class FixedLogprobs(NamedTuple):
    """Log-probabilities of a micro-batch's loss tokens, computed without gradients before training on the
    mini-batch."""

    current_M: Tensor | None = None
    """Log-probabilities under the current weights; None if the loss needs no ratios of whole trajectories."""
    proximal_M: Tensor | None = None
    """Log-probabilities under the frozen weights of `anchor: proximal`. None without frozen weights, or if the frozen
    weights equal the current weights."""
    reference_M: Tensor | None = None
    """Log-probabilities under the reference weights of the KL term; None without a KL term."""


class TrajectoryInputs(NamedTuple):
    """Inputs of the loss with one value per trajectory (or turn) of the mini-batch, on the device."""

    advantage_G: Tensor
    weight_G: Tensor
    """Weight in the loss of each loss token of the trajectory, from the reduction."""
    turn_advantage_X: Tensor | None
    """The advantage of each turn; None without credit by turn."""
    loss_ratios: TrajectoryRatios | None
    """For each trajectory, the ratios of the policy term over this rank's micro-batches. None if neither the policy
    loss nor the correction needs ratios of whole trajectories."""
    correction_ratios: TrajectoryRatios | None
    """For each trajectory, the ratios of the correction; None whenever `loss_ratios` is None."""


class _Anchor(NamedTuple):
    loss_denominator_M: Tensor
    correction_numerator_M: Tensor


class Objective:
    """The loss as configured: policy term with off-policy correction, KL term, teacher term and entropy term."""

    def __init__(
        self, settings: LearnSettings, device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None = None
    ) -> None:
        """`group`: the ranks that share each micro-batch with this rank; None if micro-batches are not shared."""
        algorithm = self._algorithm = settings.algorithm
        self._teacher = algorithm.teacher
        self._norm_tokens = algorithm.norm_tokens or settings.longest_row
        self._device = device
        self._dtype = dtype
        self._group = group
        self._loss = loss_named(algorithm.loss)
        self._corrects_trajectories = over_trajectory(algorithm.correction)
        self._ratio_metrics = RatioMetrics(device, rounding(settings.model.dtype, device))

    @property
    def needs_current(self) -> bool:
        """True if log-probabilities under the current weights are needed before the backward pass."""
        return self._loss.over_trajectory or self._corrects_trajectories

    def prepare(
        self, batch: MiniBatch, micros: Sequence[DeviceBatch], fixed: Sequence[FixedLogprobs]
    ) -> TrajectoryInputs:
        """Compute the inputs of the loss that have one value per trajectory, from all micro-batches of this rank."""
        weight_G = trajectory_weights(batch, self._algorithm.reduction, self._norm_tokens)
        both = to_device(np.stack([batch.advantage_G, weight_G]).astype(np.float64), self._device).to(self._dtype)
        turns_X = batch.turn_advantage_X
        of_turns_X = None if turns_X is None else to_device(turns_X, self._device).to(self._dtype)
        inputs = TrajectoryInputs(both[0], both[1], of_turns_X, loss_ratios=None, correction_ratios=None)
        if not self.needs_current:
            return inputs
        loss_ratios, correction_ratios = [], []
        for micro, logprobs in zip(micros, fixed, strict=True):
            if logprobs.current_M is None:
                raise ValueError("log-probabilities under the current weights were not computed")
            anchor = self._anchor(micro, logprobs, logprobs.current_M)
            loss_ratios.append(logprobs.current_M - anchor.loss_denominator_M)
            correction_ratios.append(anchor.correction_numerator_M - micro.rollout_logprob_M)
        trajectories = [micro.trajectory_M for micro in micros]
        return inputs._replace(
            loss_ratios=trajectory_ratios(loss_ratios, trajectories, len(weight_G), self._group),
            correction_ratios=trajectory_ratios(correction_ratios, trajectories, len(weight_G), self._group),
        )

    def _anchor(self, micro: DeviceBatch, fixed: FixedLogprobs, current_M: Tensor) -> _Anchor:
        if self._algorithm.anchor == "rollout":
            return _Anchor(micro.rollout_logprob_M, current_M)
        frozen_M = current_M if fixed.proximal_M is None else fixed.proximal_M
        return _Anchor(frozen_M, frozen_M)

    def loss(
        self, micro: DeviceBatch, fixed: FixedLogprobs, inputs: TrajectoryInputs, output: TokenLogprobs, sums: Sums
    ) -> Tensor:
        """The contribution of a micro-batch to the loss of its mini-batch; metrics are added to `sums`."""
        algorithm = self._algorithm
        current_M = output.logprob_M.detach()
        anchor = self._anchor(micro, fixed, current_M)
        terms = self._policy_terms(micro, inputs, output.logprob_M, anchor)
        correction = correct(
            algorithm.correction,
            anchor.correction_numerator_M - micro.rollout_logprob_M,
            inputs.correction_ratios if self._corrects_trajectories else None,
            micro.trajectory_M,
        )
        # `where`, because a masked token's term may be non-finite
        term_M = torch.where(correction.kept_M, correction.weight_M * terms.loss_M, 0)
        term_M = term_M - algorithm.entropy_coef * output.entropy_M
        if fixed.reference_M is not None:
            kl_M = kl_term(algorithm.kl_estimator, output.logprob_M, fixed.reference_M)
            term_M = term_M + algorithm.kl_coef * kl_M
            sums.add("kl_reference", kl_M.sum())
        if self._teacher is not None:
            term_M = term_M + teacher_loss(self._teacher, algorithm.kl_estimator, output.logprob_M, micro)
            add_teacher_metrics(sums, micro)
        weight_M = micro.trajectory_to_tokens(inputs.weight_G)
        loss = (weight_M * term_M).sum()
        sums.add("loss", loss)
        sums.add("loss_size", (weight_M * term_M.detach().abs()).sum())
        sums.add("entropy", output.entropy_M.sum())
        sums.add("masked", (~correction.kept_M).sum())
        sums.add("truncated", correction.truncated_M.sum())
        self._ratio_metrics.add(sums, current_M - micro.rollout_logprob_M, terms.clipped_M, micro.staleness_M)
        return loss

    def _policy_terms(
        self, micro: DeviceBatch, inputs: TrajectoryInputs, logprob_M: Tensor, anchor: _Anchor
    ) -> LossTerms:
        trajectory_log_ratio_M = None
        if self._loss.over_trajectory and inputs.loss_ratios is not None:
            trajectory_log_ratio_M = inputs.loss_ratios.mean_G.index_select(0, micro.trajectory_M)
        if inputs.turn_advantage_X is None:
            advantage_M = micro.trajectory_to_tokens(inputs.advantage_G)
        else:
            advantage_M = _turn_to_tokens(inputs.turn_advantage_X, micro)
        if self._teacher is not None:
            advantage_M = advantage_M + teacher_advantage(self._teacher, micro)
        loss_inputs = LossInputs(logprob_M, anchor.loss_denominator_M, advantage_M, trajectory_log_ratio_M)
        terms = self._loss.function(loss_inputs, self._algorithm)
        return check_terms(self._algorithm.loss, terms, loss_inputs)


def _turn_to_tokens(value_X: Tensor, micro: DeviceBatch) -> Tensor:
    """[X] -> [M]: each loss token gets the value of its turn."""
    if micro.turn_M is not None:
        return value_X.index_select(0, micro.turn_M)
    if len(micro.loss_token_M):
        raise ValueError("the mini-batch has an advantage per turn, but a micro-batch has loss tokens of no turn")
    return value_X.new_zeros(0)


def trajectory_weights(batch: MiniBatch, reduction: str, norm_tokens: int) -> Float64s:
    """[G] for each trajectory, the weight of each of its loss tokens."""
    tokens_G = batch.loss_tokens_G.astype(np.float64)
    n_trajectories = len(tokens_G)
    match reduction:
        case "token_mean":
            return _inverse(np.full(n_trajectories, tokens_G.sum(), dtype=np.float64))
        case "trajectory_mean":
            return _inverse(tokens_G * n_trajectories)
        case "prompt_mean":
            prompts = len(batch.groups)
            tokens_P = np.bincount(batch.prompt_of_trajectory_G, weights=tokens_G, minlength=prompts)
            return _inverse(prompts * tokens_P.astype(np.float64)[batch.prompt_of_trajectory_G])
        case "seq_mean_token_sum_norm":
            return np.full(n_trajectories, 1.0 / (n_trajectories * norm_tokens))
        case _:
            raise ValueError(f"unknown reduction {reduction!r}")


def _inverse(denominator: Float64s) -> Float64s:
    """1 / denominator; 0 if the denominator is 0, because then there is no loss token."""
    return np.divide(1.0, denominator, out=np.zeros_like(denominator), where=denominator > 0)


def teacher_advantage(settings: TeacherConfig, micro: DeviceBatch) -> Tensor:
    """[M] the term that the teacher adds to the advantage of each loss token."""
    if settings.mode != "advantage":
        return torch.zeros_like(micro.rollout_logprob_M)
    return settings.coef * _log_ratio(micro)


def teacher_loss(settings: TeacherConfig, kl_estimator: str, logprob_M: Tensor, micro: DeviceBatch) -> Tensor:
    """[M] the term that the teacher adds to the loss of each loss token."""
    if settings.mode != "kl" or micro.teacher_logprob_M is None:
        return torch.zeros_like(micro.rollout_logprob_M)
    known_M = ~micro.teacher_logprob_M.isnan()
    # replaces NaN by a number, because the gradient of NaN would be NaN even behind `where`
    teacher_M = torch.where(known_M, micro.teacher_logprob_M, logprob_M.detach())
    return torch.where(known_M, settings.coef * kl_term(kl_estimator, logprob_M, teacher_M), 0)


def add_teacher_metrics(sums: Sums, micro: DeviceBatch) -> None:
    """Add to `sums` the number of tokens that have a teacher, and their log-ratios of rollout to teacher."""
    n_known = micro.rollout_logprob_M.new_zeros(())
    if micro.teacher_logprob_M is not None:
        n_known = (~micro.teacher_logprob_M.isnan()).sum()
    sums.add("teacher_tokens", n_known)
    sums.add("teacher_kl", -_log_ratio(micro).sum())


def _log_ratio(micro: DeviceBatch) -> Tensor:
    """[M] log-ratio of teacher to rollout; 0 without a teacher."""
    if micro.teacher_logprob_M is None:
        return torch.zeros_like(micro.rollout_logprob_M)
    ratio_M = micro.teacher_logprob_M - micro.rollout_logprob_M
    return torch.where(ratio_M.isnan(), 0, ratio_M)
