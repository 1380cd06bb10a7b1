"""Simulated generators that join and leave: does throughput grow with them, and what do they cost the buffer?

    python -m benchmarks.elastic                       # throughput up to 64 generators, the buffer with 100 and 10,000
    python -m benchmarks.elastic --generators 100 1000

The buffer is the real one with its journal, under a virtual clock. Its cost is the CPU time of its verbs and of
serving waiting claims, per trained group. Meanwhile each generator leaves after a minute on average, and another one
joins.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from service.config import load_config
from service.simulate.scenario import Scenario, SimulationSettings
from service.simulate.world import simulated
from tests.sim.faults import Faults
from tests.sim.world import FaultyWorld

VERBS = ("join", "leave", "claim_several", "submit", "begin_lease", "lease", "commit", "covered", "tick")
SEGMENT_BYTES = 64 << 20
STAY_SECONDS = 60.0
"""Simulated seconds that a generator stays, on average."""
LOOKAHEAD = 8
MAX_GROWTH = 1.5
MIN_LINEAR = 0.95


class Cost(NamedTuple):
    """The cost of a run for the buffer."""

    seconds_per_group: float
    groups: int
    superseded_tokens: int


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


def buffer_cost(generators: int, steps: int = 8) -> Cost:
    """The buffer's CPU time per group, with generators that join and leave."""
    faults = Faults(until=1e12, generator_leaves=generators / STAY_SECONDS)
    scenario = Scenario(generators, turns=4, median_tokens=128, trainer_seconds=1e-3, steps=steps)
    world = FaultyWorld(settings(generators), scenario, faults, seed=0, segment_bytes=SEGMENT_BYTES)
    clock = _Clock()
    for of, verbs in ((world.host.buffer, VERBS), (world.host.claims, ("answer", "look", "expire"))):
        for verb in verbs:
            setattr(of, verb, clock.timed(getattr(of, verb)))
    world.begin()
    world.loop.run(lambda: world.trainer.version.step >= steps)
    status = world.host.buffer.status()
    groups = len(world.witness.trained)
    return Cost(clock.seconds / groups, groups, status.tokens["superseded"])


class _Clock:
    """The CPU time of some functions; the time of a nested call counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            start, self._depth = time.thread_time(), self._depth + 1
            try:
                return function(*arguments, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - start

        return call


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; returns 1 if one misses its bar."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=__doc__)
    parser.add_argument("--generators", type=int, nargs="+", default=[100, 10_000], help="how many, for the buffer")
    parser.add_argument("--throughput", type=int, nargs="*", default=[1, 4, 16, 64], help="how many, for throughput")
    chosen = parser.parse_args(arguments)
    failed = False
    rates = {n: tokens_per_second(n) for n in chosen.throughput}
    for n, rate in rates.items():
        least = min(rates)
        linear = rate / rates[least] * least / n
        failed |= linear < MIN_LINEAR
        print(f"{n:6} generators: {rate:9.0f} tokens/s, {linear:.3f} of linear", flush=True)
    costs: dict[int, Cost] = {}
    for n in chosen.generators:
        cost = costs[n] = buffer_cost(n)
        growth = cost.seconds_per_group / costs[chosen.generators[0]].seconds_per_group
        failed |= growth > MAX_GROWTH
        print(
            f"{n:6} generators: {1e3 * cost.seconds_per_group:.2f} ms of the buffer's CPU a group, {growth:.2f} times; "
            f"{cost.groups} groups, {cost.superseded_tokens} tokens sampled in vain",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
