"""Policy losses: the term of each token, before any reduction.

Written for the axis `M` (tokens that carry loss) alone, so there is no mask to forget. The ratio is
`exp(logprob - anchor)`; its logarithm is clamped before `exp`, so that a ratio is large but finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from service.config.tree import AlgorithmConfig

MAX_LOG_RATIO = 20.0


class Tokens(NamedTuple):
    """What a loss sees of the tokens that carry loss."""

    logprob_M: Tensor
    """Under the weights that are being trained; carries the gradient."""
    anchor_M: Tensor
    """Under the policy that the ratio is taken against."""
    advantage_M: Tensor


class Terms(NamedTuple):
    """What a loss makes of each token."""

    loss_M: Tensor
    clipped_M: Tensor
    """True where the clip took the gradient away or bounded it."""


PolicyLoss = Callable[[Tokens, AlgorithmConfig], Terms]

_LOSSES: dict[str, PolicyLoss] = {}


def policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorator: make a loss available as `algorithm.loss: name`."""

    def register(loss: PolicyLoss) -> PolicyLoss:
        if name in _LOSSES:
            raise ValueError(f"the loss {name!r} exists already")
        _LOSSES[name] = loss
        return loss

    return register


def loss_named(name: str) -> PolicyLoss:
    """The loss registered under a name."""
    return _LOSSES[name]


def safe_exp(log_ratio: Tensor) -> Tensor:
    """exp, with its argument clamped to +-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@policy_loss("ppo_clip")
def ppo_clip(tokens: Tokens, settings: AlgorithmConfig) -> Terms:
    """`-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)`; a wider high side is clip-higher."""
    ratio_M = safe_exp(tokens.logprob_M - tokens.anchor_M)
    plain_M = ratio_M * tokens.advantage_M
    clipped_M = ratio_M.clamp(1 - settings.clip_low, 1 + settings.clip_high) * tokens.advantage_M
    return Terms(-torch.minimum(plain_M, clipped_M), clipped_M < plain_M)
