"""What the simulation says about lookahead and order agrees with the table in the documentation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from functools import cache

import pytest

from service.config import load
from service.errors import RunFailed
from tests.sim.report import Report, simulated
from tests.sim.scenario import PRESET, Scenario, SimulationSettings
from tests.sim.world import HANG_GROUPS, World

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


SMALL = ("generator.concurrent_groups=8", "trainer.mini_batch_size=4", "algorithm.n_samples_per_prompt=4")


def small(lookahead: int, order: str = "finished_first") -> Report:
    settings = config(*SMALL, f"buffer.lookahead={lookahead}", f"buffer.order={order}")
    return simulated(settings, Scenario(generators=2, sigma=1.0, steps=40), seed=1)


def test_on_policy_tokens_are_never_stale_and_everybody_waits() -> None:
    report = small(0)
    assert report.staleness_max == 0
    assert report.trainer_wait > 0.5


def test_strict_order_waits_more_and_is_staler_than_finished_first_but_never_beyond_the_bound() -> None:
    first, strict = small(6), small(6, "strict")
    assert strict.staleness_max <= 6
    assert strict.trainer_wait > first.trainer_wait
    assert strict.staleness_mean > first.staleness_mean
    assert strict.beyond == 0.0


def test_lookahead_buys_speed() -> None:
    speeds = [small(lookahead).steps_per_second for lookahead in (0, 1, 4)]
    assert speeds[0] < speeds[1] < speeds[2]


def test_hundreds_of_generators_are_simulated() -> None:
    settings = config("generator.concurrent_groups=400", "trainer.mini_batch_size=100", *SMALL[2:])
    report = simulated(settings, Scenario(generators=200, steps=12), seed=0)
    assert report.trainer_wait < 0.4
    assert report.generator_wait < 0.2


FILTERED = ("algorithm.n_samples_per_prompt=2", "algorithm.filter_zero_variance=true", "buffer.lookahead=0")
SCORED = ("scorers.judge={use: judges:Judge, workers: 1}",)


@pytest.mark.parametrize(
    ("settings", "scenario"),
    [
        (FILTERED, Scenario(generators=1, sigma=0.0, steps=1, median_tokens=1000, token_seconds=1.0)),
        (SCORED, Scenario(steps=1, scorer_seconds=100.0)),
    ],
    ids=["several rounds of long trajectories", "one slow scorer"],
)
def test_groups_that_end_one_after_the_other_are_no_hang(settings: tuple[str, ...], scenario: Scenario) -> None:
    long = ("generator.max_generate_length=1000", "trainer.mini_batch_size=16", "generator.concurrent_groups=16")
    world = World(config(*long, "buffer.max_staleness=4", *settings), scenario, seed=0)
    world.run()
    assert world.witness.committed_at[0] > world.patience


def test_many_groups_that_end_untrained_between_those_that_are_trained_are_no_hang() -> None:
    few = config(*SCORED, "scorers.judge.deadline=0.1", "scorers.judge.attempts=1", "trainer.mini_batch_size=32")
    world = World(few, Scenario(steps=1, scorer_seconds=0.5, trainer_seconds=1.0), seed=0)
    world.run()
    assert world.host.buffer.ledger.state.vacated > 2 * HANG_GROUPS


def test_groups_that_all_end_untrained_are_a_hang() -> None:
    never = config(*SMALL, *SCORED, "scorers.judge.deadline=0.1", "scorers.judge.attempts=1")
    with pytest.raises(RunFailed, match=r"no optimizer step for \d+ s; .*'refused': [1-9]"):
        World(never, Scenario(generators=1, steps=4, scorer_seconds=1e6), seed=0).run()


def test_a_trainer_of_the_default_speed_is_as_fast_as_generators_whose_lengths_are_cut() -> None:
    scenario, cut = Scenario(median_tokens=64.0, sigma=0.0), config("generator.max_generate_length=8")
    assert scenario.step_seconds(cut) == pytest.approx(8 / 64 * scenario.step_seconds(config()))
