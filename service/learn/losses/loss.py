"""Policy losses: the term of each token, before any reduction.

Written for the axis `M` (tokens that carry loss) alone, so there is no mask to forget. The ratio is
`exp(logprob - anchor)`; its logarithm is clamped before `exp`, so that a ratio is large but finite.

| name | term of a token with advantage A and ratio r |
|---|---|
| ppo_clip | `-min(r A, clip(r) A)`, with `clip(r) = clamp(r, 1 - clip_low, 1 + clip_high)` |
| dual_clip | ppo_clip, but at most `-dual_clip A` where A < 0 |
| cispo | `-clip(r) A logprob`, no gradient through `clip(r)` |
| rollout_is | `-r A logprob` inside the clip range, 0 outside, no gradient through r |
| importance_sampling | `-r A` |
| gspo | ppo_clip with the geometric mean of r over the whole trajectory in place of r |
| cross_entropy | `-logprob` |

GRPO is `ppo_clip` with `estimator: grpo`; Dr. GRPO is `estimator: grpo_no_std` with
`reduction: seq_mean_token_sum_norm`. A loss of your own: decorate it, and name it `your.module:name`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from service.config.learn import AlgorithmConfig
from service.errors import ConfigError
from service.interop.user_functions import registered

MAX_LOG_RATIO = 20.0


class Tokens(NamedTuple):
    """What a loss sees of the tokens that carry loss."""

    logprob_M: Tensor
    """Under the weights that are being trained; carries the gradient."""
    anchor_M: Tensor
    """Under the policy that the ratio is taken against."""
    advantage_M: Tensor
    trajectory_log_ratio_M: Tensor | None
    """Mean of `logprob - anchor` over all loss tokens of the token's trajectory, in whatever rows; no gradient."""


class Terms(NamedTuple):
    """What a loss makes of each token."""

    loss_M: Tensor
    clipped_M: Tensor
    """True where the clip took the gradient away or bounded it."""


LossFunction = Callable[[Tokens, AlgorithmConfig], Terms]


class PolicyLoss(NamedTuple):
    """A loss and what it needs."""

    function: LossFunction
    over_trajectory: bool
    """Whether it needs `trajectory_log_ratio_M`, which costs one more forward pass."""


_LOSSES: dict[str, PolicyLoss] = {}


def policy_loss(name: str, over_trajectory: bool = False) -> Callable[[LossFunction], LossFunction]:
    """Decorator: make a loss known under a name."""

    def register(function: LossFunction) -> LossFunction:
        if name in _LOSSES:
            raise ValueError(f"the loss {name!r} exists already")
        _LOSSES[name] = PolicyLoss(function, over_trajectory)
        return function

    return register


def loss_named(setting: str) -> PolicyLoss:
    """The loss behind `algorithm.loss`: a known name, or `module:name` with the module that registers it."""
    return registered("algorithm.loss", "loss", setting, _LOSSES)


def checked(setting: str, terms: object, tokens: Tokens) -> Terms:
    """What the loss of this name returned, if it is one term per token; a wrong shape would be broadcast in silence."""
    if not isinstance(terms, Terms):
        raise ConfigError(f"algorithm.loss: {setting!r} must return Terms(loss_M, clipped_M), not {_kind(terms)}")
    for name, value in terms._asdict().items():
        if not isinstance(value, Tensor) or value.shape != tokens.logprob_M.shape:
            raise ConfigError(
                f"algorithm.loss: {setting!r} must return {name} with one value for each of "
                f"{len(tokens.logprob_M)} tokens, not {_kind(value)}"
            )
    if tokens.logprob_M.requires_grad and not terms.loss_M.requires_grad:
        raise ConfigError(
            f"algorithm.loss: {setting!r} returned a loss_M without a gradient, so nothing would be learned; compute "
            "it from logprob_M"
        )
    return terms


def _kind(value: object) -> str:
    shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"


def safe_exp(log_ratio: Tensor) -> Tensor:
    """exp, with its argument clamped to +-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clip(ratio_M: Tensor, settings: AlgorithmConfig) -> Tensor:
    return ratio_M.clamp(1 - settings.clip_low, 1 + settings.clip_high)


def _ratio(tokens: Tokens) -> Tensor:
    return safe_exp(tokens.logprob_M - tokens.anchor_M)


def _surrogate(ratio_M: Tensor, advantage_M: Tensor, settings: AlgorithmConfig) -> Terms:
    plain_M = ratio_M * advantage_M
    clipped_M = _clip(ratio_M, settings) * advantage_M
    return Terms(-torch.minimum(plain_M, clipped_M), clipped_M < plain_M)


@policy_loss("ppo_clip")
def ppo_clip(tokens: Tokens, settings: AlgorithmConfig) -> Terms:
    """The clipped surrogate; a wider high side is clip-higher."""
    return _surrogate(_ratio(tokens), tokens.advantage_M, settings)


@policy_loss("dual_clip")
def dual_clip(tokens: Tokens, settings: AlgorithmConfig) -> Terms:
    """The clipped surrogate, bounded where the advantage is negative and the ratio large."""
    terms = ppo_clip(tokens, settings)
    bound_M = -settings.dual_clip * tokens.advantage_M
    bounded_M = (tokens.advantage_M < 0) & (bound_M < terms.loss_M)
    return Terms(torch.where(bounded_M, bound_M, terms.loss_M), terms.clipped_M | bounded_M)


@policy_loss("cispo")
def cispo(tokens: Tokens, settings: AlgorithmConfig) -> Terms:
    """Policy gradient weighted by the clipped ratio: a clipped token keeps a bounded gradient."""
    ratio_M = _ratio(tokens).detach()
    weight_M = _clip(ratio_M, settings)
    return Terms(-weight_M * tokens.advantage_M * tokens.logprob_M, weight_M != ratio_M)


@policy_loss("rollout_is")
def rollout_is(tokens: Tokens, settings: AlgorithmConfig) -> Terms:
    """Policy gradient weighted by the ratio, without the tokens whose ratio is out of range."""
    ratio_M = _ratio(tokens).detach()
    outside_M = _clip(ratio_M, settings) != ratio_M
    weighted_M = ratio_M * tokens.advantage_M * tokens.logprob_M
    return Terms(-torch.where(outside_M, 0, weighted_M), outside_M)


@policy_loss("importance_sampling")
def importance_sampling(tokens: Tokens, settings: AlgorithmConfig) -> Terms:
    """The surrogate without any clip."""
    ratio_M = _ratio(tokens)
    return Terms(-ratio_M * tokens.advantage_M, torch.zeros_like(ratio_M, dtype=torch.bool))


@policy_loss("gspo", over_trajectory=True)
def gspo(tokens: Tokens, settings: AlgorithmConfig) -> Terms:
    """The clipped surrogate of the trajectory's ratio; each token carries its share of that ratio's gradient."""
    if tokens.trajectory_log_ratio_M is None:
        raise ValueError("gspo needs the trajectories' log-ratios")
    # 0 in value, the token's gradient in its derivative
    own_M = tokens.logprob_M - tokens.logprob_M.detach()
    return _surrogate(safe_exp(tokens.trajectory_log_ratio_M + own_M), tokens.advantage_M, settings)


@policy_loss("cross_entropy")
def cross_entropy(tokens: Tokens, settings: AlgorithmConfig) -> Terms:
    """Imitate every sampled token, whatever it earned."""
    return Terms(-tokens.logprob_M, torch.zeros_like(tokens.logprob_M, dtype=torch.bool))


def kl_term(estimator: str, logprob_M: Tensor, reference_M: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) from the sampled token: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    `d = logprob - reference`, clamped to +-20, as in the ratios.
    """
    difference_M = (logprob_M - reference_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return difference_M
        case "k2":
            return difference_M.square() / 2
        case "k3":
            return (-difference_M).exp() - 1 + difference_M
        case _:
            raise ValueError(f"unknown KL estimator {estimator!r}")
