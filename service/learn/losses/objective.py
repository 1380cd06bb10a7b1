"""The loss of a mini-batch, one micro-batch at a time.

    sum over loss tokens of  weight * (correction * policy term + kl_coef * KL - entropy_coef * entropy)

`weight` is the reduction's, known beforehand for the whole mini-batch; KL and entropy take the same weight, but no
off-policy correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from service.config.tree import Config
from service.learn.device_batch import DeviceBatch
from service.learn.losses.advantage import Whitening, token_advantages, whitening
from service.learn.losses.correction import TrajectoryRatios, correct, over_trajectory, trajectory_ratios
from service.learn.losses.loss import Terms, Tokens, checked, kl_term, loss_named
from service.learn.losses.reduction import trajectory_weights
from service.learn.measure import Measure
from service.learn.model.device import to_device
from service.learn.sums import Sums
from service.types import MiniBatch


class Known(NamedTuple):
    """Log-probabilities of a micro-batch's loss tokens under fixed weights."""

    own_M: Tensor | None = None
    """Under the weights as they are; only where something looks at whole trajectories before the backward pass."""
    proximal_M: Tensor | None = None
    """Under the frozen weights of `anchor: proximal`; None where those are the weights as they are."""
    reference_M: Tensor | None = None


class Across(NamedTuple):
    """Log-ratios over whole trajectories of this rank; None where nothing looks at them."""

    loss: TrajectoryRatios | None
    """Trained policy over anchor."""
    correction: TrajectoryRatios | None
    """Anchor (with `anchor: rollout` the trained policy) over rollout."""


class Batch(NamedTuple):
    """What the loss needs of each trajectory, on the device."""

    value_G: Tensor
    """The advantage; the return, where `whitening` makes advantages of it."""
    weight_G: Tensor
    whitening: Whitening | None
    across: Across


class Output(NamedTuple):
    """What the model says about the loss tokens; carries gradients."""

    logprob_M: Tensor
    entropy_M: Tensor


class _Anchor(NamedTuple):
    loss_M: Tensor
    """Below the loss's ratio."""
    correction_M: Tensor
    """Above the correction's ratio; the rollout is below."""


class Objective:
    """The configured loss, correction, KL and entropy terms."""

    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype) -> None:
        self._algorithm = config.algorithm
        self._norm_tokens = config.algorithm.norm_tokens or (
            config.generator.max_input_length + config.generator.max_generate_length
        )
        self._device = device
        self._dtype = dtype
        self._loss = loss_named(config.algorithm.loss)
        self._proximal = config.algorithm.anchor == "proximal"
        self._corrects_trajectories = over_trajectory(config.algorithm.correction)
        self._measure = Measure(device)

    @property
    def needs_own(self) -> bool:
        """Whether the weights as they are must be asked before the backward pass."""
        return self._loss.over_trajectory or self._corrects_trajectories

    def prepare(self, batch: MiniBatch, placed: Sequence[DeviceBatch], known: Sequence[Known]) -> Batch:
        """The mini-batch's numbers per trajectory, on the device."""
        algorithm = self._algorithm
        temporal = algorithm.estimator == "reinforce++"
        value_G = batch.return_G if temporal else batch.advantage_G
        weight_G = trajectory_weights(batch, algorithm.reduction, self._norm_tokens)
        both = to_device(np.stack([value_G, weight_G]).astype(np.float64), self._device).to(self._dtype)
        how = whitening(batch, algorithm.gamma) if temporal else None
        return Batch(both[0], both[1], how, self._across(placed, known, len(value_G)))

    def _across(self, placed: Sequence[DeviceBatch], known: Sequence[Known], n_trajectories: int) -> Across:
        """Gather what looks at whole trajectories over all micro-batches of this rank."""
        if not self.needs_own:
            return Across(None, None)
        behind = [self._anchor(p, k, _present(k.own_M)) for p, k in zip(placed, known, strict=True)]
        own_over_anchor = [_present(k.own_M) - anchor.loss_M for k, anchor in zip(known, behind, strict=True)]
        over_rollout = [anchor.correction_M - p.rollout_M for p, anchor in zip(placed, behind, strict=True)]
        trajectories = [p.trajectory_M for p in placed]
        return Across(
            loss=trajectory_ratios(own_over_anchor, trajectories, n_trajectories),
            correction=trajectory_ratios(over_rollout, trajectories, n_trajectories),
        )

    def _anchor(self, placed: DeviceBatch, known: Known, now_M: Tensor) -> _Anchor:
        if not self._proximal:
            return _Anchor(placed.rollout_M, now_M)
        frozen_M = now_M if known.proximal_M is None else known.proximal_M
        return _Anchor(frozen_M, frozen_M)

    def loss(self, placed: DeviceBatch, known: Known, batch: Batch, output: Output, sums: Sums) -> Tensor:
        """The micro-batch's share of the mini-batch's loss; what is measured goes into `sums`."""
        algorithm = self._algorithm
        now_M = output.logprob_M.detach()
        anchor = self._anchor(placed, known, now_M)
        terms = self._terms(placed, batch, output.logprob_M, anchor)
        fix = correct(
            algorithm.correction,
            anchor.correction_M - placed.rollout_M,
            batch.across.correction if self._corrects_trajectories else None,
            placed.trajectory_M,
        )
        # where: a masked token's term may be non-finite
        term_M = torch.where(fix.kept_M, fix.weight_M * terms.loss_M, 0)
        term_M = term_M - algorithm.entropy_coef * output.entropy_M
        if known.reference_M is not None:
            kl_M = kl_term(algorithm.kl_estimator, output.logprob_M, known.reference_M)
            term_M = term_M + algorithm.kl_coef * kl_M
            sums.add("kl_reference", kl_M.sum())
        weight_M = placed.of_trajectory(batch.weight_G) * placed.of_row(placed.share_R)
        loss = (weight_M * term_M).sum()
        sums.add("loss", loss)
        sums.add("loss_size", (weight_M * term_M.detach().abs()).sum())
        sums.add("entropy", output.entropy_M.sum())
        sums.add("masked", (~fix.kept_M).sum())
        sums.add("truncated", fix.truncated_M.sum())
        self._measure.ratios(sums, now_M - placed.rollout_M, terms.clipped_M, placed.staleness_M)
        return loss

    def _terms(self, placed: DeviceBatch, batch: Batch, logprob_M: Tensor, anchor: _Anchor) -> Terms:
        over_M = None
        if self._loss.over_trajectory and batch.across.loss is not None:
            over_M = batch.across.loss.mean_G.index_select(0, placed.trajectory_M)
        advantage_M = token_advantages(batch.value_G, batch.whitening, placed)
        tokens = Tokens(logprob_M, anchor.loss_M, advantage_M, over_M)
        return checked(self._algorithm.loss, self._loss.function(tokens, self._algorithm), tokens)


def _present(value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError("log-probabilities under the weights as they are were not computed")
    return value
