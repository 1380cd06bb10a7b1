"""Figures of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.sim.scenario import Scenario, SimulationSettings
from tests.sim.world import World


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one simulated run, its start included."""

    steps_per_second: float
    tokens_per_second: float
    """Sampled tokens of trained mini-batches, per second."""
    trainer_wait: float
    """Fraction of the time in which the trainer waited for a mini-batch."""
    generator_wait: float
    """Fraction of the time for which a slot has no group, averaged over the slots."""
    staleness_mean: float
    """Mean staleness, in versions, of all sampled tokens of trained mini-batches."""
    staleness_p99: int
    staleness_max: int
    beyond: float
    """Fraction of the sampled tokens of trained mini-batches that were staler than `max_staleness` and had no loss."""


def simulated(settings: SimulationSettings, scenario: Scenario, seed: int) -> Report:
    """Run a world and report its measurements."""
    world = World(settings, scenario, seed)
    world.run()
    measured, steps = world.witness, scenario.steps
    seconds = measured.committed_at[steps - 1]
    ages = np.repeat(list(measured.staleness), list(measured.staleness.values()))
    slots = sum(generator.slots for generator in world.generators)
    idle = sum(generator.wait_seconds for generator in world.generators)
    return Report(
        steps_per_second=steps / seconds,
        tokens_per_second=len(ages) / len(measured.committed_at) * steps / seconds,
        trainer_wait=sum(measured.wait_seconds[:steps]) / seconds,
        generator_wait=idle / (slots * seconds),
        staleness_mean=float(ages.mean()),
        staleness_p99=int(np.quantile(ages, 0.99)),
        staleness_max=int(ages.max()),
        beyond=float((ages > settings.max_staleness).mean()),
    )
