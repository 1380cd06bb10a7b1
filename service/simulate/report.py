"""Throughput, waiting and staleness of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.config import Config
from service.simulate.scenario import Scenario
from service.simulate.world import World


@dataclass(frozen=True, slots=True)
class Report:
    """Measures of one run from its first second."""

    steps_per_second: float
    tokens_per_second: float
    """Sampled tokens of trained mini-batches."""
    trainer_wait: float
    """Fraction of the time in which the trainer waited for a mini-batch."""
    generator_wait: float
    """Fraction of the slots' time without work."""
    staleness_mean: float
    """Versions, over all sampled tokens of trained mini-batches."""
    staleness_p99: int
    staleness_max: int
    beyond: float
    """Fraction of those tokens that were staler than `max_staleness`, and carried no loss."""
    length_distance: float
    """Largest difference between the distributions of generated and trained lengths, 0 to 1."""


def simulated(config: Config, scenario: Scenario, seed: int) -> Report:
    """Run a world and measure it."""
    world = World(config, scenario, seed)
    world.run()
    witness, steps = world.witness, scenario.steps
    seconds = witness.committed_at[steps - 1]
    ages = np.repeat(list(witness.staleness), list(witness.staleness.values()))
    slots = sum(generator.slots for generator in world.generators)
    idle = sum(generator.wait_seconds for generator in world.generators)
    trained = witness.trained
    return Report(
        steps_per_second=steps / seconds,
        tokens_per_second=len(ages) / len(witness.committed_at) * steps / seconds,
        trainer_wait=sum(witness.wait_seconds[:steps]) / seconds,
        generator_wait=idle / (slots * seconds),
        staleness_mean=float(ages.mean()),
        staleness_p99=int(np.quantile(ages, 0.99)),
        staleness_max=int(ages.max()),
        beyond=float((ages > config.buffer.max_staleness).mean()),
        length_distance=distance(
            np.array(list(witness.generated.values())),
            np.array([tokens for of, tokens in witness.generated.items() if of.group_id in trained]),
        ),
    )


def distance(a: np.typing.NDArray[np.int64], b: np.typing.NDArray[np.int64]) -> float:
    """The largest difference between two samples' distribution functions (Kolmogorov-Smirnov)."""
    both = np.sort(np.concatenate((a, b)))
    below = [np.searchsorted(np.sort(x), both, side="right") / len(x) for x in (a, b)]
    return float(np.abs(below[0] - below[1]).max())
