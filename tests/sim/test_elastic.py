"""Generators that join and leave, simulated: what leaving ones cost, and what many of them cost the buffer."""

from __future__ import annotations

from service.config import load_config
from tests.invariant import violations
from tests.sim.faults import Faults
from tests.sim.report import simulated
from tests.sim.scenario import Scenario, SimulationSettings
from tests.sim.world import World

LOOKAHEAD = 8


def settings(generators: int, groups_each: int = 1) -> SimulationSettings:
    """Settings with enough open groups for every generator; mini-batches grow with the number of generators."""
    batch = max(generators * groups_each // 4, 1)
    config = load_config(
        [],
        [
            "env.max_turns=4",
            f"generator.concurrent_groups={generators * groups_each}",
            "generator.max_input_length=4096",
            "generator.max_generate_length=1024",
            f"buffer.lookahead={LOOKAHEAD}",
            f"buffer.max_staleness={LOOKAHEAD}",
            "buffer.step_deadline=1e6",
            "buffer.lease_deadline=1e6",
            "buffer.max_attempts=1000",
            "buffer.max_bytes=1099511627776",
            "buffer.max_journal_bytes=1099511627776",
            "algorithm.n_samples_per_prompt=4",
            f"trainer.mini_batch_size={batch}",
            "trainer.ranks=1",
            "trainer.max_tokens_per_micro_batch=131072",
        ],
    )
    return SimulationSettings.of(config)


def tokens_per_second(generators: int) -> float:
    """Trained tokens per simulated second; the trainer is so fast that nothing waits for it."""
    scenario = Scenario(generators, turns=4, median_tokens=128, sigma=0.7, trainer_seconds=1e-3, steps=24)
    return simulated(settings(generators, groups_each=16), scenario, seed=0).tokens_per_second


def test_what_a_leaving_generator_plays_starts_again() -> None:
    faults = Faults(until=20.0, generator_leaves=1.0, delay=0.01)
    scenario = Scenario(4, turns=4, median_tokens=128, trainer_seconds=1e-3, steps=16)
    world = World(settings(8), scenario, 1, faults, segment_bytes=10_000)
    world.run()
    status = world.host.buffer.status()
    assert world.fault_count > 10 and violations(world.host.buffer.ledger) == []
    assert status.restarts["generator_left"] > 0 and status.tokens["superseded"] > 0


def test_throughput_grows_with_the_generators() -> None:
    assert tokens_per_second(4) >= 0.95 * 4 * tokens_per_second(1)
