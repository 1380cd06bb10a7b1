"""The flow of groups is that of the simulator, which plays the buffer's own code."""

from dataclasses import replace

import numpy as np
import pytest

from service.config import load
from service.plan.step_seconds import Setting, mean_before_cut
from tests.sim.calm_world import simulated
from tests.sim.scenario import PRESET, Scenario, SimulationSettings

SIZE = ("trainer.mini_batch_size=8", "generator.concurrent_groups=16", "algorithm.n_samples_per_prompt=4")
SCENARIO = Scenario(generators=1, median_tokens=24, steps=36)


def setting(scenario: Scenario, lookahead: int) -> Setting:
    """What the simulator is given, as the flow takes it."""
    config = load([], [*PRESET, *SIZE]).config
    return Setting(
        mini_batch_size=8,
        samples=4,
        lookahead=lookahead,
        slots=16,
        engines=1,
        iteration=lambda running: scenario.token_seconds,
        tokens=scenario.median_tokens * np.exp(scenario.sigma**2 / 2),
        sigma=scenario.sigma,
        most_tokens=config.generator.max_generate_length,
        environment_seconds=0.0,
        train_seconds=scenario.step_seconds(SimulationSettings.of(config)),
    )


@pytest.mark.parametrize(("sigma", "lookahead"), [(0.5, 0), (0.5, 1), (0.5, 4), (1.0, 1)])
def test_speed_waiting_and_staleness_are_those_of_the_simulator(sigma: float, lookahead: int) -> None:
    scenario = replace(SCENARIO, sigma=sigma)
    config = load([], [*PRESET, *SIZE, f"buffer.lookahead={lookahead}"]).config
    simulator = simulated(SimulationSettings.of(config), scenario, seed=0)
    flow = setting(scenario, lookahead).flow()
    assert flow.step_seconds == pytest.approx(1 / simulator.steps_per_second, rel=0.15)
    assert flow.trainer_waits == pytest.approx(simulator.trainer_wait, abs=0.08)
    assert flow.generators_wait == pytest.approx(simulator.generator_wait, abs=0.08)
    assert flow.staleness == pytest.approx(simulator.staleness_mean, abs=0.4)


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("most", [100.0, 101.0, 200.0, 5000.0])
def test_lengths_have_the_mean_that_is_given_although_long_ones_are_cut(sigma: float, most: float) -> None:
    tokens = mean_before_cut(100.0, sigma, most)
    lengths = replace(setting(SCENARIO, 1), tokens=tokens, sigma=sigma, most_tokens=most)._lengths(1)
    assert lengths.mean() == pytest.approx(100.0, rel=0.02) and lengths.max() <= most


def test_more_lookahead_makes_no_step_slower_and_all_work_staler() -> None:
    found = [setting(SCENARIO, lookahead).flow() for lookahead in (0, 1, 2, 4)]
    seconds, staleness = [flow.step_seconds for flow in found], [flow.staleness for flow in found]
    assert seconds == sorted(seconds, reverse=True) and staleness == sorted(staleness)
    assert staleness[0] == 0


def test_a_slow_environment_lengthens_every_trajectory_and_leaves_the_engines_free() -> None:
    fast, slow = setting(SCENARIO, 1).flow(), replace(setting(SCENARIO, 1), environment_seconds=5.0).flow()
    assert slow.step_seconds > fast.step_seconds + 2 and slow.running < fast.running


def test_a_large_mini_batch_is_played_in_part_and_takes_as_long() -> None:
    small = setting(SCENARIO, 4)
    large = replace(small, mini_batch_size=512, slots=1024, engines=64, train_seconds=small.train_seconds)
    assert large.flow().step_seconds == pytest.approx(small.flow().step_seconds, rel=0.15)


def test_more_slots_than_the_kv_cache_has_room_for_change_no_rate_and_leave_no_slot_idle() -> None:
    room = 40
    base = replace(setting(SCENARIO, 4), iteration=lambda running: 0.02 * max(1.0, running / room), train_seconds=0.1)
    found = [replace(base, slots=slots).flow() for slots in (16, 32, 64)]
    assert [flow.step_seconds for flow in found] == pytest.approx([found[0].step_seconds] * 3, rel=0.01)
    assert [flow.generators_wait for flow in found] == pytest.approx([0.0] * 3, abs=0.01)
