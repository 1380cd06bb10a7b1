"""Compares the engine's and the trainer's log-probabilities of tokens that the newest policy sampled.

Both are log-probabilities of the same token under the same weights, so they differ by rounding only. A larger
difference means that the engine serves other weights than the trainer sent, or samples from another distribution than
the trainer assumes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from service.config.learn import WeightsConfig

FRESH_KL = "policy/by_staleness/0/kl"


def logprob_mismatch(metrics: Mapping[str, float], weights: WeightsConfig) -> str | None:
    """The reason to end the run; None if the difference is within `weights.verify_tolerance`.

    None too if `weights.verify` is off, or if the step had no token of the newest policy. The metric is the mean of
    `ratio - 1 - log ratio`, which is half the mean square of a small log ratio.
    """
    divergence = metrics.get(FRESH_KL)
    if not weights.verify or divergence is None:
        return None
    difference = math.sqrt(2 * max(divergence, 0.0))
    if difference <= weights.verify_tolerance:
        return None
    return (
        f"engine and trainer disagree about the newest policy by {difference:.2g} nats a token (root mean square), "
        f"weights.verify_tolerance is {weights.verify_tolerance:g}: the engine does not serve what the trainer sent"
    )
