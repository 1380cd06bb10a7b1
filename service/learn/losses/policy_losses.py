"""Policy losses: each computes one loss term per token, before the reduction.

All tensors have the axis `M`, the tokens that carry loss, so a loss needs no mask. The ratio of a token is
`exp(logprob - anchor)`; its logarithm is clamped before `exp`, so that the ratio stays finite.

| name | term of a token with advantage A and ratio r |
|---|---|
| ppo_clip | `-min(r A, clip(r) A)`, with `clip(r) = clamp(r, 1 - clip_low, 1 + clip_high)` |
| dual_clip | as ppo_clip, but at most `-dual_clip A` where A < 0 |
| cispo | `-clip(r) A logprob`, no gradient through `clip(r)` |
| rollout_is | `-r A logprob` inside the clip range, 0 outside, no gradient through r |
| importance_sampling | `-r A` |
| gspo | as ppo_clip, with the geometric mean of r over the whole trajectory in place of r |
| cross_entropy | `-logprob` |

GRPO is `ppo_clip` with `estimator: grpo`; Dr. GRPO is `estimator: grpo_no_std` with
`reduction: seq_mean_token_sum_norm`. To add a loss, decorate a function with `policy_loss` and set `algorithm.loss` to
`your.module:name`.

Sources:

- PPO, the clipped surrogate and the surrogate without a clip: Schulman et al. 2017, arXiv:1707.06347, section 3
- GRPO: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300; Dr. GRPO: Liu et al. 2025, arXiv:2503.20783
- a wider high side of the clip (clip-higher): Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.1
- dual clip: Ye et al. 2019, arXiv:1912.09729
- CISPO: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585
- rollout_is (direct double-sided importance sampling): GLM-5 Team 2026 (GLM-5), arXiv:2602.15763
- GSPO, in the token form that has the same value and gradient: Zheng et al. 2025, arXiv:2507.18071
- anchor apart from the rollout (decoupled PPO): Hilton et al. 2021, arXiv:2110.00641; with asynchronous rollouts
  Fu et al. 2025 (AReaL), arXiv:2505.24298
- KL estimators: J. Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from service.config.learn import AlgorithmConfig
from service.errors import ConfigError
from service.user_code import registered

MAX_LOG_RATIO = 20.0


class LossInputs(NamedTuple):
    """The arguments of a policy loss: one value per token that carries loss."""

    logprob_M: Tensor
    """Log-probability of each token under the trained weights; carries the gradient."""
    anchor_M: Tensor
    """Log-probability of each token under the anchor, whose probability is the denominator of the ratio."""
    advantage_M: Tensor
    trajectory_log_ratio_M: Tensor | None
    """For each token, the mean of `logprob - anchor` over all loss tokens of its trajectory, in all rows; carries no
    gradient."""


class LossTerms(NamedTuple):
    """The result of a policy loss: one term per token."""

    loss_M: Tensor
    clipped_M: Tensor
    """True for tokens whose gradient a clip removed or bounded."""


LossFunction = Callable[[LossInputs, AlgorithmConfig], LossTerms]


class PolicyLoss(NamedTuple):
    """A registered policy loss."""

    function: LossFunction
    over_trajectory: bool
    """Whether the loss needs `trajectory_log_ratio_M`, which costs one more forward pass."""


_LOSSES: dict[str, PolicyLoss] = {}


def policy_loss(name: str, over_trajectory: bool = False) -> Callable[[LossFunction], LossFunction]:
    """Decorator: register a policy loss under a name. `over_trajectory`: whether the loss needs the log-ratios of whole
    trajectories."""

    def register(function: LossFunction) -> LossFunction:
        if name in _LOSSES:
            raise ValueError(f"the loss {name!r} exists already")
        _LOSSES[name] = PolicyLoss(function, over_trajectory)
        return function

    return register


def loss_named(setting: str) -> PolicyLoss:
    """The policy loss that `algorithm.loss` selects: a registered name, or `module:name` of a module that registers the
    loss."""
    return registered("algorithm.loss", "loss", setting, _LOSSES)


def check_terms(setting: str, terms: object, inputs: LossInputs) -> LossTerms:
    """Check the result of a policy loss and return it; without the check, a wrong shape would be broadcast silently.

    Raises:
        ConfigError: the result does not have one term per token, or has no gradient.
    """
    if not isinstance(terms, LossTerms):
        raise ConfigError(f"algorithm.loss: {setting!r} must return LossTerms(loss_M, clipped_M), not {_kind(terms)}")
    for name, value in terms._asdict().items():
        if not isinstance(value, Tensor) or value.shape != inputs.logprob_M.shape:
            raise ConfigError(
                f"algorithm.loss: {setting!r} must return {name} with one value for each of "
                f"{len(inputs.logprob_M)} tokens, not {_kind(value)}"
            )
    if inputs.logprob_M.requires_grad and not terms.loss_M.requires_grad:
        raise ConfigError(
            f"algorithm.loss: {setting!r} returned a loss_M without a gradient, so nothing would be learned; compute "
            "it from logprob_M"
        )
    return terms


def _kind(value: object) -> str:
    shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"


def safe_exp(log_ratio: Tensor) -> Tensor:
    """`exp(log_ratio)`, with the log-ratio clamped to the range -20 to 20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clip(ratio_M: Tensor, settings: AlgorithmConfig) -> Tensor:
    return ratio_M.clamp(1 - settings.clip_low, 1 + settings.clip_high)


def _ratio(inputs: LossInputs) -> Tensor:
    return safe_exp(inputs.logprob_M - inputs.anchor_M)


def _surrogate(ratio_M: Tensor, advantage_M: Tensor, settings: AlgorithmConfig) -> LossTerms:
    plain_M = ratio_M * advantage_M
    clipped_M = _clip(ratio_M, settings) * advantage_M
    return LossTerms(-torch.minimum(plain_M, clipped_M), clipped_M < plain_M)


@policy_loss("ppo_clip")
def ppo_clip(inputs: LossInputs, settings: AlgorithmConfig) -> LossTerms:
    """The clipped surrogate of PPO. With `clip_high` above `clip_low` it has DAPO's wider upper clip (clip-higher)."""
    return _surrogate(_ratio(inputs), inputs.advantage_M, settings)


@policy_loss("dual_clip")
def dual_clip(inputs: LossInputs, settings: AlgorithmConfig) -> LossTerms:
    """The clipped surrogate of PPO, with a second bound where the advantage is negative and the ratio large (Ye et
    al.)."""
    terms = ppo_clip(inputs, settings)
    bound_M = -settings.dual_clip * inputs.advantage_M
    bounded_M = (inputs.advantage_M < 0) & (bound_M < terms.loss_M)
    return LossTerms(torch.where(bounded_M, bound_M, terms.loss_M), terms.clipped_M | bounded_M)


@policy_loss("cispo")
def cispo(inputs: LossInputs, settings: AlgorithmConfig) -> LossTerms:
    """Policy gradient weighted by the clipped ratio; a token outside the clip range keeps a bounded gradient
    (MiniMax-M1)."""
    ratio_M = _ratio(inputs).detach()
    weight_M = _clip(ratio_M, settings)
    return LossTerms(-weight_M * inputs.advantage_M * inputs.logprob_M, weight_M != ratio_M)


@policy_loss("rollout_is")
def rollout_is(inputs: LossInputs, settings: AlgorithmConfig) -> LossTerms:
    """Policy gradient weighted by the ratio; a token with a ratio outside the clip range has no gradient (GLM-5)."""
    ratio_M = _ratio(inputs).detach()
    outside_M = _clip(ratio_M, settings) != ratio_M
    weighted_M = ratio_M * inputs.advantage_M * inputs.logprob_M
    return LossTerms(-torch.where(outside_M, 0, weighted_M), outside_M)


@policy_loss("importance_sampling")
def importance_sampling(inputs: LossInputs, settings: AlgorithmConfig) -> LossTerms:
    """The policy-gradient surrogate `ratio * advantage`, without a clip."""
    ratio_M = _ratio(inputs)
    return LossTerms(-ratio_M * inputs.advantage_M, torch.zeros_like(ratio_M, dtype=torch.bool))


@policy_loss("gspo", over_trajectory=True)
def gspo(inputs: LossInputs, settings: AlgorithmConfig) -> LossTerms:
    """The clipped surrogate with the ratio of the whole trajectory in place of each token's ratio; the gradient still
    flows through the log-probability of each token (GSPO)."""
    if inputs.trajectory_log_ratio_M is None:
        raise ValueError("gspo needs the trajectories' log-ratios")
    # its value is 0, its gradient that of the token's log-probability
    own_M = inputs.logprob_M - inputs.logprob_M.detach()
    return _surrogate(safe_exp(inputs.trajectory_log_ratio_M + own_M), inputs.advantage_M, settings)


@policy_loss("cross_entropy")
def cross_entropy(inputs: LossInputs, settings: AlgorithmConfig) -> LossTerms:
    """The cross-entropy of each sampled token, regardless of its advantage."""
    return LossTerms(-inputs.logprob_M, torch.zeros_like(inputs.logprob_M, dtype=torch.bool))


def kl_term(estimator: str, logprob_M: Tensor, reference_M: Tensor) -> Tensor:
    """Schulman's estimates of KL(policy || reference) per sampled token: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    `d = logprob - reference`, clamped to the range -20 to 20. The gradient of d has the mean 0, so k1 has that of k2.
    """
    difference_M = (logprob_M - reference_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            square_M = difference_M.square() / 2
            return difference_M.detach() + (square_M - square_M.detach())
        case "k2":
            return difference_M.square() / 2
        case "k3":
            return (-difference_M).exp() - 1 + difference_M
        case _:
            raise ValueError(f"unknown KL estimator {estimator!r}")
