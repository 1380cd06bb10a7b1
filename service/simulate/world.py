"""Simulated runs from seeds: work, faults, drain, and a check of the promises throughout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.config import Config
from service.simulate.generator import SimulatedGenerator
from service.simulate.host import Host
from service.simulate.loop import Loop
from service.simulate.network import Network
from service.simulate.scenario import Scenario
from service.simulate.trainer import SimulatedTrainer
from service.simulate.witness import Broken, Witness

LOOK_SECONDS = 7.0
HANG_SECONDS = 600.0
"""Simulated seconds without an optimizer step, after the last fault, that count as a hang."""


class World:
    """Generators, buffer and trainer of one seed."""

    def __init__(self, config: Config, scenario: Scenario, seed: int, segment_bytes: int = 64 << 20) -> None:
        self.scenario, self.seed = scenario, seed
        rngs = [np.random.default_rng((seed, part)) for part in range(5)]
        faults = scenario.faults
        self.loop = Loop()
        self.witness = Witness(config, self.loop)
        self.host = Host(config, self.loop, self.witness, rngs[1], segment_bytes)
        self.network = Network(self.loop, rngs[2], faults.delay, faults.lost, faults.doubled)
        self.generators = [
            SimulatedGenerator(f"g{i}", self.host, self.network, scenario, rngs[3]) for i in range(scenario.generators)
        ]
        self.trainer = SimulatedTrainer(self.generators, self.host, self.network, scenario, rngs[4])

    def begin(self) -> None:
        """Start all processes."""
        self.trainer.start()
        for generator in self.generators:
            generator.start()

    def is_calm(self) -> bool:
        """Whether no faults come any more; a world without faults is calm from the beginning."""
        return True

    def run(self) -> None:
        """Train the scenario's steps, end all faults, drain, and check the promises.

        Raises:
            Broken: a promise was broken. Every exception carries the seed as a note.
        """
        try:
            self._run()
        except BaseException as error:
            error.add_note(f"seed {self.seed}")
            raise

    def _run(self) -> None:
        self.begin()
        self._look()
        self._until(lambda: self.trainer.version.step >= self.scenario.steps)
        self._until(self.is_calm)
        self.host.buffer.drain("max_steps")
        self.host.look_soon()
        self._until(lambda: self.trainer.drained)
        self.trainer.save()
        self._until(lambda: self.host.buffer.ledger.state.covered == self.trainer.version.step)
        self.host.buffer.end()
        self.witness.look(self.host.buffer)
        self.witness.check_the_end(self.host.buffer)

    def _until(self, done: Callable[[], bool]) -> None:
        """Let time pass until `done()`; raise Broken when the world hangs."""
        begun = self.loop.now

        def stuck() -> bool:
            last = max(begun, self.scenario.faults.until, *self.witness.committed_at[-1:])
            return self.loop.now - last > HANG_SECONDS

        if not self.loop.run(lambda: done() or stuck()):
            raise Broken(f"no event is left at {self.loop.now:.0f} s; {self._where()}")
        if not done():
            raise Broken(f"no optimizer step for {HANG_SECONDS:.0f} s; {self._where()}")

    def _where(self) -> str:
        status = self.host.buffer.status()
        waits = "; ".join(f"{wait.who} waits: {wait.detail}" for wait in status.waits)
        refusals = dict(self.witness.refusals)
        return f"version {status.policy_version}, groups {status.groups}, refused messages {refusals}, {waits}"

    def _look(self) -> None:
        """Compare buffer and witness at regular times."""
        if self.host.alive:
            self.witness.look(self.host.buffer)
        self.loop.after(LOOK_SECONDS, self._look)
