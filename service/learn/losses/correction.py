"""Off-policy correction: gives each token a weight and a mask, from its probability ratio (anchor / rollout policy).
The anchor is the policy with which the policy term of the loss compares the trained policy (`algorithm.anchor`).

    log_ratio_M   log-probability of a loss token under the anchor - under the rollout policy
                  (with `anchor: rollout`: under the trained policy - under the rollout policy)
    trajectory    sum, mean, smallest and largest log-ratio over all rows of a trajectory

- `truncate: token` weights a token by min(ratio, truncate_at): truncated importance sampling (TIS) [1, 2]
- `truncate: sequence` weights a token by min(product of its trajectory's ratios, truncate_at) [3]
- `token_band` masks a token whose ratio is outside the band: IcePop [4]; if the band begins at 0, this is masked
  importance sampling [3]
- `sequence_band` masks a trajectory if the product of its ratios is outside the band, `geometric_band` if their
  geometric mean is [3]
- `outlier_band` masks a trajectory if any of its ratios is outside the band [5]

1. E. Ionides 2008, "Truncated Importance Sampling", Journal of Computational and Graphical Statistics 17(2)
2. F. Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
3. J. Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
4. Ling Team 2025, "Small Leak Can Sink a Great Ship: Boost RL Training on MoE with IcePop!"
5. SkyRL's outlier_token_is_threshold, github.com/NovaSky-AI/SkyRL/pull/849

All rows of a trajectory are on one rank, so sums over the trajectory need no communication. With sequence parallelism
the rows are on one group of ranks, and the sums are added up over the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from service.config.learn import CorrectionConfig
from service.learn.losses.policy_losses import safe_exp


class TrajectoryRatios(NamedTuple):
    """Sum, mean, smallest and largest log-ratio of each trajectory's loss tokens; 0 for trajectories without such
    tokens."""

    sum_G: Tensor
    mean_G: Tensor
    smallest_G: Tensor
    largest_G: Tensor


class Correction(NamedTuple):
    """Weight and mask for the loss of each token."""

    weight_M: Tensor
    kept_M: Tensor
    """True for tokens that keep their loss; False for masked tokens."""
    truncated_M: Tensor


def trajectory_ratios(
    log_ratios: Sequence[Tensor],
    trajectories: Sequence[Tensor],
    n_trajectories: int,
    group: dist.ProcessGroup | None = None,
) -> TrajectoryRatios:
    """Sum, mean, smallest and largest log-ratio of each trajectory, over several micro-batches and over the ranks of
    the group. `log_ratios`, `trajectories`: the log-ratio and the trajectory of each loss token, `[M]` per
    micro-batch."""
    log_ratio, trajectory = torch.cat(list(log_ratios)), torch.cat(list(trajectories))
    counted = torch.stack([log_ratio, torch.ones_like(log_ratio)]).double()
    sums = counted.new_zeros(2, n_trajectories).index_add(1, trajectory, counted)
    both = torch.stack([-log_ratio, log_ratio])
    extremes = both.new_full((2, n_trajectories), -torch.inf)
    extremes = extremes.scatter_reduce(1, trajectory.expand(2, -1), both, "amax")
    if group is not None:
        dist.all_reduce(sums, group=group)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    sum_G, tokens_G = sums.to(log_ratio.dtype)
    smallest_G, largest_G = torch.where(tokens_G > 0, extremes, 0)
    return TrajectoryRatios(sum_G, sum_G / tokens_G.clamp(min=1), -smallest_G, largest_G)


def over_trajectory(settings: CorrectionConfig) -> bool:
    """True if the correction needs the ratios of whole trajectories."""
    bands = (settings.sequence_band, settings.geometric_band, settings.outlier_band)
    return settings.truncate == "sequence" or any(band is not None for band in bands)


def correct(
    settings: CorrectionConfig, log_ratio_M: Tensor, of_trajectory: TrajectoryRatios | None, trajectory_M: Tensor
) -> Correction:
    """The weight and the mask of each token. `of_trajectory`: the ratios of whole trajectories; None if
    `over_trajectory` is False for these settings."""
    kept_M = _inside(settings.token_band, log_ratio_M)
    weight_M = torch.ones_like(log_ratio_M)
    if settings.truncate == "token":
        weight_M = safe_exp(log_ratio_M)
    if of_trajectory is not None:
        whole = TrajectoryRatios(*(value_G.index_select(0, trajectory_M) for value_G in of_trajectory))
        kept_M = kept_M & _inside(settings.sequence_band, whole.sum_G) & _inside(settings.geometric_band, whole.mean_G)
        kept_M = kept_M & _inside(settings.outlier_band, whole.smallest_G)
        kept_M = kept_M & _inside(settings.outlier_band, whole.largest_G)
        if settings.truncate == "sequence":
            weight_M = safe_exp(whole.sum_G)
    truncated_M = weight_M > settings.truncate_at if settings.truncate != "off" else torch.zeros_like(kept_M)
    return Correction(torch.where(truncated_M, settings.truncate_at, weight_M), kept_M, truncated_M)


def _inside(band: tuple[float, float] | None, log_ratio_M: Tensor) -> Tensor:
    if band is None:
        return torch.ones_like(log_ratio_M, dtype=torch.bool)
    ratio_M = safe_exp(log_ratio_M)
    return (ratio_M >= band[0]) & (ratio_M <= band[1])
