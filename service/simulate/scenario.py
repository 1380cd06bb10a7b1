"""The inputs of a simulation: shape of the work, machines, faults."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from service.types import Int64s


@dataclass(frozen=True, slots=True)
class Faults:
    """How much goes wrong, until `until`; rates are events per simulated second."""

    until: float = 0.0
    buffer_deaths: float = 0.0
    generator_deaths: float = 0.0
    generator_freezes: float = 0.0
    trainer_deaths: float = 0.0
    disk_full: float = 0.0
    clock_jumps: float = 0.0
    silent: float = 0.0
    """Fraction of turns that never end."""
    failing: float = 0.0
    """Fraction of trajectories whose environment fails at last."""
    bad_steps: float = 0.0
    """Fraction of optimizer steps that are not applied."""
    delay: float = 0.0
    """Mean seconds that a message travels; 0: no network between the processes."""
    lost: float = 0.0
    doubled: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """The world around the buffer; the buffer's own settings are in the configuration."""

    generators: int = 4
    turns: int = 1
    """Turns of a trajectory."""
    median_tokens: float = 64.0
    """Median tokens of a trajectory, over all its turns."""
    sigma: float = 0.5
    """Sigma of the lognormal distribution of lengths."""
    token_seconds: float = 0.02
    """Seconds that an engine takes for one token of one trajectory."""
    trainer_seconds: float | None = None
    """Seconds of one optimizer step; None: as long as the generators take for a mini-batch (balanced)."""
    linger_seconds: float = 0.05
    """Seconds that a finished step waits for others to share its message."""
    sync_seconds: float = 0.0
    """Seconds from an optimizer step to engines that serve its weights; the trainer does not wait for it."""
    success: float = 0.5
    """Fraction of trajectories with reward 1."""
    steps: int = 60
    """Optimizer steps to simulate."""
    faults: Faults = field(default_factory=Faults)

    def lengths(self, rng: np.random.Generator, count: int) -> Int64s:
        """Tokens of so many trajectories."""
        drawn = rng.lognormal(np.log(self.median_tokens), self.sigma, count)
        return np.maximum(np.round(drawn), 1).astype(np.int64)

    def balanced_trainer_seconds(self, mini_batch_size: int, n_samples: int, concurrent_groups: int) -> float:
        """Seconds that the generators take for a mini-batch when all are busy: a group ends with its longest sample."""
        lengths = self.lengths(np.random.default_rng(0), 4096 * n_samples).reshape(-1, n_samples)
        return float(lengths.max(axis=1).mean()) * self.token_seconds * mini_batch_size / concurrent_groups
