"""The inputs of a simulation: shape of the work, machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service.config import Config
from service.types import Int64s


def _option(default: Any, meaning: str) -> Any:
    """A field that is also an option of `baton simulate`."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, slots=True)
class Scenario:
    """The world around the buffer; the buffer's own settings are in the configuration."""

    generators: int = _option(4, "generator actors that share generator.concurrent_groups")
    turns: int = _option(1, "turns of a trajectory")
    median_tokens: float = _option(64.0, "median of a trajectory's sampled tokens")
    sigma: float = _option(0.5, "of the lognormal lengths: 0.5 moderate, 1.0 long tails")
    token_seconds: float = _option(0.02, "seconds of one token of one trajectory")
    trainer_seconds: float | None = _option(
        None, "seconds of one optimizer step; default: as long as the generators take for a mini-batch"
    )
    sync_seconds: float = _option(0.0, "seconds from an optimizer step to engines that serve it")
    """The trainer does not wait for the weights to arrive."""
    scorer_seconds: float = _option(1.0, "mean seconds in which a scorer answers about a group")
    steps: int = _option(60, "optimizer steps to simulate")
    linger_seconds: float = 0.05
    """Seconds that a finished step waits for others to share its message."""
    success: float = 0.5
    """Fraction of trajectories with reward 1."""
    restorable: bool = True
    """Whether environments can be restored, so that trajectories continue in another generator."""

    def slots(self, config: Config) -> int:
        """Groups that one generator plays at once."""
        return max(config.generator.concurrent_groups // self.generators, 1)

    def lengths(self, rng: np.random.Generator, count: int) -> Int64s:
        """Tokens of `count` trajectories."""
        drawn = rng.lognormal(np.log(self.median_tokens), self.sigma, count)
        return np.maximum(np.round(drawn), 1).astype(np.int64)

    def step_seconds(self, config: Config) -> float:
        """Seconds of an optimizer step: `trainer_seconds`, or as long as busy generators take for a mini-batch.

        A group ends with its longest sample, so a slot takes the mean of the longest samples' times for a group.
        """
        if self.trainer_seconds:
            return self.trainer_seconds
        n_samples = config.algorithm.n_samples_per_prompt
        lengths = self.lengths(np.random.default_rng(0), 4096 * n_samples).reshape(-1, n_samples)
        group_seconds = float(lengths.max(axis=1).mean()) * self.token_seconds
        return group_seconds * config.trainer.mini_batch_size / (self.slots(config) * self.generators)
