"""A simulated run of one seed: generators and trainer around the production buffer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.errors import RunFailed
from service.handoff.ledger.lifecycle import GroupState
from tests.sim.generator import SimulatedGenerator
from tests.sim.host import Host
from tests.sim.loop import Loop
from tests.sim.measurements import Measurements, Report, distance
from tests.sim.scenario import Scenario, SimulationSettings
from tests.sim.trainer import SimulatedTrainer

HANG_SECONDS = 600.0
"""A run hangs if it takes no optimizer step and ends no group for this many simulated seconds more than the longest
regular pause: the seconds of the longest trajectory, its scorers, an evaluation with the longest trajectories, an
optimizer step, and the arrival of the step's weights."""
HANG_GROUPS = 100
"""A run hangs too if this many groups in a row end untrained, without a complete group between them."""
SEGMENT_BYTES = 64 << 20


class World:
    """One simulated run: generators, buffer and trainer, all random numbers drawn from one seed. Tests use
    subclasses with faulty parts."""

    generator_class = SimulatedGenerator
    trainer_class = SimulatedTrainer
    calm_from = 0.0
    """Simulated time, in seconds, from which a missing optimizer step counts as a hang; the run ends later."""

    def __init__(self, settings: SimulationSettings, scenario: Scenario, seed: int) -> None:
        self.settings, self.scenario, self.seed = settings, scenario, seed
        self.rngs = [np.random.default_rng((seed, part)) for part in range(6)]
        self.loop = Loop()
        self.measured = self.new_measurements()
        self.host = self.new_host()
        self.host.start()
        self.generators = [
            self.generator_class(f"g{number}", self.host, scenario, self.rngs[3], self.measured)
            for number in range(scenario.generators)
        ]
        self.trainer = self.trainer_class(self.generators, self.host, scenario, self.rngs[4], self.measured)
        at_once = scenario.slots(settings) * settings.buffer.limits.n_samples_per_prompt
        longest = scenario.longest(settings) * scenario.token_seconds
        self.patience = (
            HANG_SECONDS
            + (1 - (-self.trainer.evaluation_share // at_once)) * longest
            + max((scorer.attempts * scorer.deadline for scorer in settings.scorers.values()), default=0.0)
            + self.trainer.step_seconds
            + scenario.sync_seconds
        )

    def new_measurements(self) -> Measurements:
        """Make the object that records measurements."""
        return Measurements()

    def new_host(self) -> Host:
        """Make the process of the buffer."""
        return Host(self.settings, self.scenario, self.loop, self.rngs[5], SEGMENT_BYTES)

    def begin(self) -> None:
        """Start all processes except the buffer, which already runs."""
        self.trainer.start()
        for generator in self.generators:
            generator.start()

    def run(self) -> None:
        """Train until the scenario's number of optimizer steps, drain the buffer, and end the run."""
        self.begin()
        self._until(lambda: self.trainer.version.step >= self.scenario.steps)
        self._until(lambda: self.loop.now > self.calm_from and self.host.alive)
        self.host.buffer.drain("max_steps")
        self.host.look_soon()
        self._until(lambda: self.trainer.drained)
        self.trainer.save()
        self._until(lambda: self.host.buffer.ledger.state.covered == self.trainer.version.step)
        self.host.buffer.end()

    def _until(self, done: Callable[[], bool]) -> None:
        """Advance time until `done()` is true; raises RunFailed if the simulated run hangs."""
        begun = since = self.loop.now
        useful, ended, ended_before = (0, 0), 0, 0

        def stuck() -> bool:
            nonlocal since, useful, ended, ended_before
            ledger, earlier = self.host.buffer.ledger, (useful, ended)
            complete = ledger.state.next_finished - ledger.in_state[GroupState.FILTERED]
            useful, ended = (len(self.measured.committed_at), complete), ledger.state.vacated
            if self.loop.now < self.calm_from or (useful, ended) != earlier:
                since = self.loop.now
            if self.loop.now < self.calm_from or useful != earlier[0]:
                ended_before = ended
            return self.loop.now - since > self.patience or ended - ended_before > HANG_GROUPS

        if not self.loop.run(lambda: done() or stuck()):
            raise RunFailed(f"no event is left at {self.loop.now:.0f} s; {self._where()}")
        if not done():
            seconds = self.loop.now - max(begun, self.calm_from, *self.measured.committed_at[-1:])
            raise RunFailed(f"no optimizer step for {seconds:.0f} s; {self._where()}")

    def _where(self) -> str:
        status = self.host.buffer.status()
        waits = "; ".join(f"{wait.who} waits: {wait.detail}" for wait in status.waits)
        return f"version {status.policy_version}, groups {status.groups}, refused {status.refused}, {waits}"


def simulated(settings: SimulationSettings, scenario: Scenario, seed: int) -> Report:
    """Run a world and report its measurements."""
    world = World(settings, scenario, seed)
    world.run()
    measured, steps = world.measured, scenario.steps
    seconds = measured.committed_at[steps - 1]
    ages = np.repeat(list(measured.staleness), list(measured.staleness.values()))
    slots = sum(generator.slots for generator in world.generators)
    idle = sum(generator.wait_seconds for generator in world.generators)
    trained = measured.trained
    return Report(
        steps_per_second=steps / seconds,
        tokens_per_second=len(ages) / len(measured.committed_at) * steps / seconds,
        trainer_wait=sum(measured.wait_seconds[:steps]) / seconds,
        generator_wait=idle / (slots * seconds),
        staleness_mean=float(ages.mean()),
        staleness_p99=int(np.quantile(ages, 0.99)),
        staleness_max=int(ages.max()),
        beyond=float((ages > settings.max_staleness).mean()),
        length_distance=distance(
            np.array(list(measured.generated.values())),
            np.array([tokens for of, tokens in measured.generated.items() if of.group_id in trained]),
        ),
    )
