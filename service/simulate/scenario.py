"""The inputs of a simulation: shape of the work, machines, faults."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from service.config import Config
from service.types import Int64s


def _fault(*drawn: float) -> Any:
    """A frequency of faults: 0 unless it is given, or one of these where `Faults.drawn` chooses."""
    return field(default=0.0, metadata={"drawn": drawn})


@dataclass(frozen=True, slots=True)
class Faults:
    """How much goes wrong, until `until`; rates are events per simulated second."""

    until: float = 0.0
    buffer_deaths: float = _fault(0.0, 0.05, 0.3)
    generator_deaths: float = _fault(0.0, 0.1)
    generator_freezes: float = _fault(0.0, 0.1)
    generator_leaves: float = _fault(0.0, 0.2)
    """Generators that leave in order; another one joins in place of each."""
    trainer_deaths: float = _fault(0.0, 0.1)
    disk_full: float = _fault(0.0, 0.05)
    clock_jumps: float = _fault(0.05)
    silent: float = _fault(0.0, 0.03)
    """Fraction of turns that never end."""
    bad_steps: float = _fault(0.0, 0.1)
    """Fraction of optimizer steps that are not applied."""
    delay: float = _fault(0.01, 0.2)
    """Mean seconds that a message travels; 0: no network between the processes."""
    lost: float = _fault(0.0, 0.1)
    doubled: float = _fault(0.0, 0.1)
    failing: float = _fault(0.0, 0.1)
    """Fraction of trajectories whose environment fails in the last turn."""
    undelivered: float = _fault(0.0, 0.1)
    """Fraction of turns whose response nobody receives, so that it is not trained."""
    bad_answers: float = _fault(0.0, 0.3)
    """Fraction of a scorer's answers that are late, lost, wrong or twofold."""

    @classmethod
    def drawn(cls, rng: np.random.Generator, until: float) -> Faults:
        """Each kind of fault is absent, or as frequent as it can be while the world still makes progress."""
        choices = {kind.name: kind.metadata["drawn"] for kind in fields(cls) if kind.metadata}
        return cls(until, **{name: float(rng.choice(rates)) for name, rates in choices.items()})


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
    goes_on: bool = True
    """Whether environments can be restored, so that trajectories go on in another generator."""
    faults: Faults = field(default_factory=Faults)

    def slots(self, config: Config) -> int:
        """Groups that one generator plays at once."""
        return max(config.generator.concurrent_groups // self.generators, 1)

    def lengths(self, rng: np.random.Generator, count: int) -> Int64s:
        """Tokens of so many trajectories."""
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
