"""Compares the engine's and the trainer's log-probabilities of tokens that the newest policy sampled.

Both are log-probabilities of the same token under the same weights, so they differ by rounding only. A larger
difference means that the engine serves other weights than the trainer sent, or samples from another distribution than
the trainer assumes.

Rounding in bfloat16 has rare outliers, which would dominate a mean. The check therefore uses the fraction of tokens
that differ by more than `weights.verify_tolerance`:

    differences 0.01 0.02 4.0 0.01 ... (100 tokens), tolerance 0.1   ->   0.01: rounding
    differences 0.2  0.3  0.1 0.25 ... (100 tokens), tolerance 0.1   ->   0.9: other weights
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from service.config.learn import WeightsConfig

FRESH = "policy/by_staleness/0"
"""Prefix of the keys of metrics about the tokens that the newest policy sampled."""

LARGEST_FRACTION = 0.1
"""Maximum fraction of the newest policy's tokens that may differ by more than the tolerance."""

MIN_TOKENS = 50
"""An optimizer step with fewer tokens of the newest policy is not checked."""

STEPS_IN_A_ROW = 3
"""Number of consecutive optimizer steps in which engine and trainer must disagree before the run ends."""


class LogprobCheck:
    """Detects, over several optimizer steps in a row, that the engine's and the trainer's log-probabilities
    disagree."""

    def __init__(self, weights: WeightsConfig) -> None:
        self._weights = weights
        self._disagreed = 0
        self._agreed_at: int | None = None

    def mismatch(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The reason to end the run after optimizer step `step`; None if there is no reason, or if `weights.verify` is
        off."""
        if not self._weights.verify or metrics.get(f"{FRESH}/tokens", 0) < MIN_TOKENS:
            return None
        differing = metrics[f"{FRESH}/differing_fraction"]
        if differing <= LARGEST_FRACTION:
            self._disagreed, self._agreed_at = 0, step
            return None
        self._disagreed += 1
        if self._disagreed < STEPS_IN_A_ROW:
            return None
        root_mean_square = math.sqrt(2 * max(metrics[f"{FRESH}/kl"], 0.0))
        return (
            f"engine and trainer disagree about the newest policy in {self._disagreed} steps in a row: {differing:.0%} "
            f"of {metrics[f'{FRESH}/tokens']:.0f} tokens differ by more than weights.verify_tolerance "
            f"({self._weights.verify_tolerance:g} nats; root mean square about {root_mean_square:.2g}). {self._cause()}"
        )

    def _cause(self) -> str:
        if self._agreed_at is None:
            return (
                "They have not agreed in any step, so look at what differs between them from the start: model.dtype, "
                "generator.engine_options (quantization, rope scaling), sampling settings that change the distribution"
            )
        return f"They agreed until step {self._agreed_at}: the engine does not serve what the trainer sent"
