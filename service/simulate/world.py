"""Simulated runs from seeds: work, faults, drain, and a check of the promises throughout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.config import Config
from service.simulate.faults import FaultInjector
from service.simulate.generator import SimulatedGenerator
from service.simulate.host import Host
from service.simulate.loop import Loop
from service.simulate.network import Network
from service.simulate.scenario import Faults, Scenario
from service.simulate.trainer import SimulatedTrainer
from service.simulate.witness import Broken, Witness

LOOK_SECONDS = 7.0
HANG_SECONDS = 600.0
"""Simulated seconds without an optimizer step, after the last fault, that count as a hang."""
FAULT_SECONDS = 25.0


class World:
    """Generators, buffer and trainer of one seed."""

    def __init__(self, config: Config, scenario: Scenario, seed: int, segment_bytes: int = 64 << 20) -> None:
        self.scenario, self.seed = scenario, seed
        rngs = [np.random.default_rng((seed, part)) for part in range(5)]
        faults = scenario.faults
        self.loop = Loop()
        self.witness = Witness(config, self.loop)
        self.host = Host(config, self.loop, self.witness, rngs[1], segment_bytes)
        network = Network(self.loop, rngs[2], faults.delay, faults.lost, faults.doubled)
        self.generators = [
            SimulatedGenerator(f"g{i}", self.host, network, scenario, rngs[3]) for i in range(scenario.generators)
        ]
        self.trainer = SimulatedTrainer(self.generators, self.host, network, scenario, rngs[4])
        self.faults = FaultInjector(faults, self.host, network, self.generators, self.trainer, rngs[0])

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


def fault_world(seed: int) -> World:
    """A small world in which every kind of fault may happen, with any settings that the configuration allows."""
    rng = np.random.default_rng((seed, 99))
    scenario = Scenario(
        generators=3,
        turns=3,
        median_tokens=12.0,
        sigma=0.7,
        token_seconds=0.05,
        linger_seconds=0.02,
        trainer_seconds=1.0,
        steps=6,
        faults=_faults(rng),
    )
    return World(_config(rng), scenario, seed, segment_bytes=int(rng.choice([1, 3_000, 1 << 20])))


def _config(rng: np.random.Generator) -> Config:
    lookahead = int(rng.integers(0, 4))
    return Config.model_validate(
        {
            "env": {"max_turns": 3},
            "generator": {"max_input_length": 256, "max_generate_length": 64, "concurrent_groups": 6},
            "buffer": {
                "lookahead": lookahead,
                "max_staleness": int(rng.integers(lookahead, 6)),
                "order": str(rng.choice(["finished_first", "strict"])),
                "step_deadline": 8.0,
                "lease_deadline": 20.0,
                "max_attempts": 20,
                "max_lease_attempts": 10,
            },
            "algorithm": {"n_samples_per_prompt": 2, "filter_zero_variance": bool(rng.integers(2))},
            "trainer": {
                "mini_batch_size": 2,
                "ranks": int(rng.integers(1, 3)),
                "max_tokens_per_micro_batch": 1024,
                "checkpoint_every": int(rng.integers(1, 4)),
            },
        }
    )


def _faults(rng: np.random.Generator) -> Faults:
    """Each kind is absent, or as frequent as it can be while the world still gets somewhere."""

    def maybe(*rates: float) -> float:
        return float(rng.choice([0.0, *rates]))

    return Faults(
        until=FAULT_SECONDS,
        buffer_deaths=maybe(0.05, 0.3),
        generator_deaths=maybe(0.1),
        generator_freezes=maybe(0.1),
        trainer_deaths=maybe(0.1),
        disk_full=maybe(0.05),
        clock_jumps=0.05,
        silent=maybe(0.03),
        bad_steps=maybe(0.1),
        delay=float(rng.choice([0.01, 0.2])),
        lost=maybe(0.1),
        doubled=maybe(0.1),
        failing=maybe(0.1),
    )
