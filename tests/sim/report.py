"""Figures of a simulated run."""

from dataclasses import dataclass

import numpy as np

from tests.sim.scenario import Scenario, SimulationSettings
from tests.sim.world import World


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one simulated run, its start included."""

    steps_per_second: float
    trainer_wait: float
    """Fraction of the time in which the trainer waited for a mini-batch."""
    staleness_mean: float
    """Mean staleness, in versions, of all sampled tokens of trained mini-batches."""
    beyond: float
    """Fraction of the sampled tokens of trained mini-batches that were staler than `max_staleness` and had no loss."""


def simulated(settings: SimulationSettings, scenario: Scenario, seed: int) -> Report:
    """Run a world and report its measurements."""
    world = World(settings, scenario, seed)
    world.run()
    measured, steps = world.witness, scenario.steps
    seconds = measured.committed_at[steps - 1]
    ages = np.repeat(list(measured.staleness), list(measured.staleness.values()))
    return Report(
        steps_per_second=steps / seconds,
        trainer_wait=sum(measured.wait_seconds[:steps]) / seconds,
        staleness_mean=float(ages.mean()),
        beyond=float((ages > settings.max_staleness).mean()),
    )
