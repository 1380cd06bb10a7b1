"""The teacher's term of the loss: on-policy distillation.

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

import torch
from torch import Tensor

from service.config.learn import TeacherConfig
from service.learn.device_batch import DeviceBatch
from service.learn.losses.policy_losses import kl_term
from service.learn.losses.step_metrics import Sums


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
