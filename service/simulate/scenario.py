"""The inputs of a simulation: the workload and the machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service.config import Config, DataConfig
from service.config.core_settings import buffer_settings
from service.config.rollout import ScorerConfig
from service.handoff.settings import BufferSettings
from service.types import Int64s

VOCABULARY = 1 << 20
DRAWN = 1 << 15
"""Number of trajectories whose lengths are drawn to compute the mean time of a group."""


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """The settings of a configuration that a simulation needs."""

    buffer: BufferSettings
    scorers: Mapping[str, ScorerConfig]
    data: DataConfig
    """Settings of the data; a simulation uses only the settings of evaluations."""
    sync_interval: float
    """Minimum seconds between two syncs of the journal."""
    concurrent_groups: int
    """Groups that all generators play at once."""
    sync_every: int
    """Optimizer steps between two publications of weights."""
    checkpoint_every: int
    max_staleness: int
    """Staleness in versions above which a token carries no loss."""

    @staticmethod
    def of(config: Config) -> SimulationSettings:
        """The settings from a configuration."""
        return SimulationSettings(
            buffer_settings(config, VOCABULARY),
            config.scorers,
            config.data,
            config.buffer.sync_interval,
            config.generator.concurrent_groups,
            config.weights.sync_every,
            config.trainer.checkpoint_every,
            config.buffer.max_staleness,
        )


def _option(default: Any, meaning: str, lowest: float, highest: float, configured: str = "") -> Any:
    """A field that is also an option of `baton simulate`, with its bounds; `configured`: its value by default if there
    is a configuration (`Scenario.of`)."""
    return field(default=default, metadata={"help": meaning, "bounds": (lowest, highest), "configured": configured})


@dataclass(frozen=True, slots=True)
class Scenario:
    """The workload and the machines around the buffer; the buffer's own settings are in `SimulationSettings`."""

    generators: int = _option(
        4, "generator actors that share generator.concurrent_groups", 1, 1e4, "generator.engines or its min"
    )
    turns: int = _option(1, "turns of a trajectory", 1, 1e5, "the mean of 1 and env.max_turns, rounded up")
    median_tokens: float = _option(
        64.0, "median of a trajectory's sampled tokens", 1, 1e9, "half of generator.max_generate_length in each turn"
    )
    sigma: float = _option(0.5, "of the lognormal lengths: 0.5 moderate, 1.0 long tails", 0, 5)
    token_seconds: float = _option(0.02, "seconds of one token of one trajectory", 1e-9, 10)
    trainer_seconds: float | None = _option(
        None, "seconds of one optimizer step; default: as long as the generators take for a mini-batch", 1e-9, 1e6
    )
    sync_seconds: float = _option(0.0, "seconds from an optimizer step to engines that serve it", 0, 1e6)
    """The trainer does not wait for the weights to arrive."""
    scorer_seconds: float = _option(1.0, "mean seconds in which a scorer answers about a group", 0, 1e6)
    steps: int = _option(60, "optimizer steps to simulate", 1, 1e6)
    linger_seconds: float = 0.05
    """Seconds that a finished step waits for other steps, to share a message with them."""
    success: float = 0.5
    """Fraction of trajectories with reward 1."""

    @staticmethod
    def of(config: Config, given: Mapping[str, Any]) -> Scenario:
        """The scenario of a configuration. Figures that are not in `given` are assumed as in `baton plan`."""
        turns = given.get("turns", (config.env.max_turns + 2) // 2)
        tokens = turns * config.generator.max_generate_length / 2
        assumed = {"generators": config.generator.min_engines, "turns": turns, "median_tokens": tokens}
        return Scenario(**{**assumed, **given})

    def slots(self, settings: SimulationSettings) -> int:
        """Number of groups that one generator plays at once."""
        return max(settings.concurrent_groups // self.generators, 1)

    def lengths(self, rng: np.random.Generator, count: int) -> Int64s:
        """Draw the numbers of sampled tokens of `count` trajectories."""
        drawn = rng.lognormal(np.log(self.median_tokens), self.sigma, count)
        return np.maximum(np.round(drawn), 1).astype(np.int64)

    def step_seconds(self, settings: SimulationSettings) -> float:
        """Seconds of an optimizer step: `trainer_seconds` if set, otherwise the time in which busy generators play a
        mini-batch.

        A group occupies its slot until its longest sample ends. So the mean time of a group in its slot is the mean
        over groups of the longest sample's time.
        """
        if self.trainer_seconds is not None:
            return self.trainer_seconds
        lengths = np.minimum(self._drawn(settings), self.longest(settings))
        group_seconds = float(lengths.max(axis=1).mean()) * self.token_seconds
        return group_seconds * settings.buffer.mini_batch_size / (self.slots(settings) * self.generators)

    def cut(self, settings: SimulationSettings) -> float:
        """Fraction of the trajectories that the limits of the configuration cut, because they would be longer."""
        return float((self._drawn(settings) > self.longest(settings)).mean())

    def _drawn(self, settings: SimulationSettings) -> Int64s:
        """[group, sample] lengths of about `DRAWN` trajectories, without limits."""
        samples = settings.buffer.limits.n_samples_per_prompt
        return self.lengths(np.random.default_rng(0), max(1, DRAWN // samples) * samples).reshape(-1, samples)

    def longest(self, settings: SimulationSettings) -> int:
        """Maximum sampled tokens of a trajectory within the limits of the configuration."""
        return self.turns * settings.buffer.limits.max_generate_length
