"""One simulated run from a seed: work, faults, drain, and a check of the promises throughout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.config import Config
from service.simulate.disk import MemoryDisk
from service.simulate.faults import FaultInjector
from service.simulate.generator import SimulatedGenerator
from service.simulate.host import Host
from service.simulate.loop import Loop
from service.simulate.network import Network
from service.simulate.scenario import Scenario
from service.simulate.trainer import SimulatedTrainer
from service.simulate.witness import Broken, Witness

PROMPTS = 1000
LOOK_SECONDS = 7.0
PATIENCE_SECONDS = 600.0
"""Simulated seconds without an optimizer step, after the last fault, that count as a hang."""


class World:
    """Generators, buffer and trainer of one seed."""

    def __init__(self, config: Config, scenario: Scenario, seed: int, segment_bytes: int = 64 << 20) -> None:
        self.config, self.scenario, self.seed = config, scenario, seed
        rngs = [np.random.default_rng((seed, part)) for part in range(5)]
        faults = scenario.faults
        self.loop = Loop()
        self.disk = MemoryDisk()
        uids = [f"prompt-{row}" for row in range(PROMPTS)]
        self.host = Host(config, uids, self.loop, self.disk, rngs[1], segment_bytes)
        self.network = Network(self.loop, rngs[2], faults.delay, faults.lost, faults.doubled)
        self.witness = Witness(config, self.loop)
        longest = config.generator.max_generate_length
        slots = max(config.generator.concurrent_groups // scenario.generators, 1)
        self.generators = [
            SimulatedGenerator(f"g{i}", slots, longest, scenario, self.host, self.network, self.witness, rngs[3])
            for i in range(scenario.generators)
        ]
        seconds = scenario.trainer_seconds or scenario.balanced_trainer_seconds(
            config.trainer.mini_batch_size, config.algorithm.n_samples_per_prompt, slots * scenario.generators
        )
        self.trainer = SimulatedTrainer(
            config, scenario, seconds, self.host, self.network, self.generators, self.witness, rngs[4]
        )
        self.faults = FaultInjector(faults, self.host, self.network, self.generators, self.trainer, rngs[0])
        self.host.on_restart = lambda: self.witness.look(self.host)

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
        self.trainer.start()
        for generator in self.generators:
            generator.start()
        self.faults.begin()
        self._look()
        self._until(lambda: self.trainer.version.step >= self.scenario.steps)
        self._until(self.faults.over)
        self.host.buffer.drain("max_steps")
        self.host.look_soon()
        self._until(lambda: self.trainer.drained)
        self.trainer.save()
        self._until(lambda: self.host.buffer.ledger.state.covered == self.trainer.version.step)
        self.host.buffer.end()
        self.witness.look(self.host)
        self.witness.check_the_end(self.host)

    def _until(self, done: Callable[[], bool]) -> None:
        """Let time pass until `done()`; raise Broken when the world hangs."""
        begun = self.loop.now

        def stuck() -> bool:
            last = max(begun, self.scenario.faults.until, *self.witness.committed_at[-1:])
            return self.loop.now - last > PATIENCE_SECONDS

        if not self.loop.run(lambda: done() or stuck()):
            raise Broken(f"nothing happens any more at {self.loop.now:.0f} s; {self._where()}")
        if not done():
            raise Broken(f"no optimizer step for {PATIENCE_SECONDS:.0f} s; {self._where()}")

    def _where(self) -> str:
        status = self.host.buffer.status()
        waits = "; ".join(f"{wait.who} waits: {wait.detail}" for wait in status.waits)
        return f"version {status.policy_version}, groups {status.groups}, {waits}"

    def _look(self) -> None:
        """Compare buffer and witness from time to time."""
        if self.host.alive:
            self.witness.look(self.host)
        self.loop.after(LOOK_SECONDS, self._look)
