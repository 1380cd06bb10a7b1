"""The inputs of a simulation: the workload and the machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from service.config import Config
from service.config.core_settings import buffer_settings
from service.config.rollout import ScorerConfig
from service.handoff.buffer_settings import BufferSettings
from service.types import Int64s

VOCABULARY = 1 << 20
PRESET = (
    "env.max_turns=1",
    "generator.concurrent_groups=64",
    "generator.max_input_length=64",
    "generator.max_generate_length=16384",
    "buffer.lookahead=4",
    "buffer.max_staleness=8",
    "buffer.step_deadline=1e6",
    "buffer.lease_deadline=1e6",
    "buffer.max_bytes=1099511627776",
    "trainer.mini_batch_size=32",
    "trainer.ranks=1",
    "trainer.max_tokens_per_micro_batch=131072",
)
"""The settings of the table in docs/staleness.md: 64 groups of 8 trajectories at once, mini-batches of 32 groups, and
room for the longest trajectories."""
DRAWN = 1 << 15
"""Number of trajectories whose lengths are drawn to compute the mean time of a group."""


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """The settings of a configuration that a simulation needs."""

    buffer: BufferSettings
    scorers: Mapping[str, ScorerConfig]
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
            config.generator.concurrent_groups,
            config.weights.sync_every,
            config.trainer.checkpoint_every,
            config.buffer.max_staleness,
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """The workload and the machines around the buffer; the buffer's own settings are in `SimulationSettings`."""

    generators: int = 4
    """Generators, which share `generator.concurrent_groups`."""
    turns: int = 1
    median_tokens: float = 64.0
    """Median of a trajectory's sampled tokens."""
    sigma: float = 0.5
    """Of the lognormal lengths: 0.5 moderate, 1.0 long tails."""
    token_seconds: float = 0.02
    trainer_seconds: float | None = None
    """Seconds of an optimizer step; None: as long as the generators take for a mini-batch."""
    sync_seconds: float = 0.0
    """Seconds from an optimizer step to engines that serve it; the trainer does not wait for them."""
    scorer_seconds: float = 1.0
    """Mean seconds in which a scorer answers about a group."""
    steps: int = 60
    """Optimizer steps to simulate."""
    linger_seconds: float = 0.05
    """Seconds that a finished step waits for other steps, to share a message with them."""
    success: float = 0.5
    """Fraction of trajectories with reward 1."""

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

    def _drawn(self, settings: SimulationSettings) -> Int64s:
        """[group, sample] lengths of about `DRAWN` trajectories, without limits."""
        samples = settings.buffer.limits.n_samples_per_prompt
        return self.lengths(np.random.default_rng(0), max(1, DRAWN // samples) * samples).reshape(-1, samples)

    def longest(self, settings: SimulationSettings) -> int:
        """Maximum sampled tokens of a trajectory within the limits of the configuration."""
        return self.turns * settings.buffer.limits.max_generate_length
