"""Do engine and trainer compute the same policy?

A token that the newest policy sampled has two log-probabilities of one and the same distribution: the engine's, made
when it was sampled, and the trainer's. They differ by rounding only, unless an engine serves other weights than the
trainer sent, or samples from another distribution than the trainer assumes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from service.config.learn import WeightsConfig

FRESH_KL = "policy/by_staleness/0/kl"


def disagreement(metrics: Mapping[str, float], weights: WeightsConfig) -> str | None:
    """What is wrong with a step's fresh tokens; None where they agree, are missing, or nobody asked.

    The mean of `ratio - 1 - log ratio` is half the mean square of a small difference.
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
