"""What the simulation says about lookahead and order agrees with the table in the documentation."""

import math
import statistics
from collections.abc import Iterable
from functools import cache

import pytest

from service.config import load
from service.errors import RunFailed
from tests.sim.report import Report, simulated
from tests.sim.scenario import PRESET, Scenario, SimulationSettings
from tests.sim.world import World

STEPS = 60
SEEDS = 8


def config(*settings: str) -> SimulationSettings:
    return SimulationSettings.of(load([], [*PRESET, *settings]).config)


@cache
def measured(sigma: float, *settings: str) -> list[Report]:
    """Of several seeds: the few longest trajectories decide so much that the waiting scatters by 3 to 7 points."""
    return [simulated(config(*settings), Scenario(sigma=sigma, steps=STEPS), seed) for seed in range(SEEDS)]


def agrees(values: Iterable[float], table: float, rounding: float = 0.0) -> bool:
    """Whether the mean of the runs is within a tenth of the table, as far as so few runs can tell."""
    listed = list(values)
    mean, error = statistics.fmean(listed), statistics.stdev(listed) / math.sqrt(len(listed))
    print(f"{mean:.4f} ± {error:.4f}, in the table {table}")
    return abs(mean - table) <= max(0.1 * table, rounding) + 2 * error


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sigma", "lookahead", "order", "speed", "wait", "staleness", "beyond"),
    [
        (0.5, 4, "finished_first", 4.8, 0.04, 2.7, 0.0),
        (0.5, 4, "strict", 4.0, 0.20, 3.6, 0.0),
        (1.0, 8, "finished_first", 8.2, 0.04, 3.2, 0.016),
        (1.0, 8, "strict", 5.5, 0.35, 6.9, 0.0),
    ],
)
def test_the_rows_of_the_table_come_out_within_a_tenth(
    sigma: float, lookahead: int, order: str, speed: float, wait: float, staleness: float, beyond: float
) -> None:
    on_policy = measured(sigma, "buffer.lookahead=0")
    reports = measured(sigma, f"buffer.lookahead={lookahead}", f"buffer.order={order}")
    ratios = [r.steps_per_second / base.steps_per_second for r, base in zip(reports, on_policy, strict=True)]
    assert agrees(ratios, speed)
    assert agrees((r.trainer_wait for r in reports), wait, rounding=0.01)
    assert agrees((r.staleness_mean for r in reports), staleness)
    assert agrees((r.beyond for r in reports), beyond, rounding=0.001)


def test_groups_that_all_end_untrained_are_a_hang() -> None:
    few = ("generator.concurrent_groups=8", "trainer.mini_batch_size=4", "algorithm.n_samples_per_prompt=4")
    judge = ("scorers.judge={use: judges:Judge, workers: 1, deadline: 0.1, attempts: 1}",)
    with pytest.raises(RunFailed, match=r"no optimizer step for \d+ s; .*'refused': [1-9]"):
        World(config(*few, *judge), Scenario(generators=1, steps=4, scorer_seconds=1e6), seed=0).run()
