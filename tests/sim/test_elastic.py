"""Generators that join and leave, simulated: what leaving ones cost, and what many of them cost the buffer."""

from __future__ import annotations

import pytest

from benchmarks.elastic import MAX_GROWTH, MIN_LINEAR, buffer_cost, main, settings, tokens_per_second
from service.simulate.scenario import Scenario
from tests.invariant import violations
from tests.sim.faults import Faults
from tests.sim.world import FaultyWorld


def test_what_a_leaving_generator_plays_starts_again() -> None:
    faults = Faults(until=20.0, generator_leaves=1.0, delay=0.01)
    scenario = Scenario(4, turns=4, median_tokens=128, trainer_seconds=1e-3, steps=16)
    world = FaultyWorld(settings(8), scenario, faults, seed=1, segment_bytes=10_000)
    world.run()
    status = world.host.buffer.status()
    assert world.fault_count > 10 and violations(world.host.buffer.ledger) == []
    assert status.restarts["generator_left"] > 0 and status.tokens["superseded"] > 0


def test_throughput_grows_with_the_generators() -> None:
    assert tokens_per_second(4) >= MIN_LINEAR * 4 * tokens_per_second(1)


def test_a_group_costs_the_buffer_as_much_with_ten_times_the_generators() -> None:
    few, many = buffer_cost(20), buffer_cost(200)
    assert many.seconds_per_group <= MAX_GROWTH * few.seconds_per_group


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_bars_hold_with_ten_thousand_generators() -> None:
    assert main([]) == 0
