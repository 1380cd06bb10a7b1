"""What goes wrong in a simulated world, and when; drawn from the world's seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from service.simulate.disk import AMPLE_ROOM
from service.simulate.generator import SimulatedGenerator
from service.simulate.host import Host
from service.simulate.network import Network
from service.simulate.scenario import Faults
from service.simulate.trainer import SimulatedTrainer

# Means of exponentially distributed times.
RESTART_SECONDS = 2.0
FREEZE_SECONDS = 15.0
FULL_SECONDS = 8.0
NOTICE_SECONDS = 3.0


class FaultInjector:
    """Independent streams of faults until `Faults.until`; every process that died starts again."""

    def __init__(
        self,
        faults: Faults,
        host: Host,
        network: Network,
        generators: Sequence[SimulatedGenerator],
        trainer: SimulatedTrainer,
        rng: np.random.Generator,
    ) -> None:
        self._faults = faults
        self._host = host
        self._loop = host.loop
        self._network = network
        self._generators = generators
        self._trainer = trainer
        self._rng = rng
        self.count = 0
        """Faults so far."""

    def begin(self) -> None:
        """Schedule every stream, and the end of all faults."""
        self._host.on_death = lambda: self._soon(RESTART_SECONDS, self._host.start)
        faults = self._faults
        for rate, fault in (
            (faults.buffer_deaths, self._kill_buffer),
            (faults.generator_deaths, self._kill_generator),
            (faults.generator_freezes, self._freeze_generator),
            (faults.trainer_deaths, self._kill_trainer),
            (faults.disk_full, self._fill_disk),
            (faults.clock_jumps, self._jump_clock),
        ):
            if rate:
                self._next(rate, fault)
        self._loop.after(faults.until, self._heal)

    def over(self) -> bool:
        """Whether no more faults come and the buffer runs."""
        return self._loop.now >= self._faults.until and self._host.alive and not self._host.doom

    def _next(self, rate: float, fault: Callable[[], None]) -> None:
        def strike() -> None:
            if self._loop.now < self._faults.until:
                self.count += 1
                fault()
                self._next(rate, fault)

        self._soon(1.0 / rate, strike)

    def _soon(self, mean_seconds: float, callback: Callable[[], None]) -> None:
        self._loop.after(float(self._rng.exponential(mean_seconds)), callback)

    def _heal(self) -> None:
        self._network.heal()
        self._host.disk.room = AMPLE_ROOM
        self._host.doom = None

    def _kill_buffer(self) -> None:
        """Kill the buffer now, or when it next comes to a named seam."""
        if not self._host.alive:
            return
        seam = self._rng.integers(3)
        if seam == 0:
            self._host.die()
        else:
            self._host.doom = ("before_sync" if seam == 1 else "after_sync", int(self._rng.integers(8)))

    def _kill_generator(self) -> None:
        generator = self._some_generator()
        generator.die()
        self._notice(generator.name)
        self._soon(RESTART_SECONDS, generator.start)

    def _freeze_generator(self) -> None:
        generator = self._some_generator()
        generator.freeze(float(self._rng.exponential(FREEZE_SECONDS)))
        self._notice(generator.name)

    def _notice(self, name: str) -> None:
        """In half of all cases a supervisor reports a generator that stopped; in the others only deadlines help."""

        def leave() -> None:
            if self._host.alive and (member := self._host.buffer.ledger.state.generators.get(name)) is not None:
                self._host.buffer.leave(name, member.incarnation, "no heartbeat")

        if self._rng.random() < 0.5:
            self._soon(NOTICE_SECONDS, leave)

    def _some_generator(self) -> SimulatedGenerator:
        return self._generators[int(self._rng.integers(len(self._generators)))]

    def _kill_trainer(self) -> None:
        self._trainer.die()
        self._soon(RESTART_SECONDS, self._trainer.start)

    def _fill_disk(self) -> None:
        disk = self._host.disk
        disk.room = disk.used() + int(self._rng.integers(4096))

        def empty() -> None:
            disk.room = AMPLE_ROOM

        self._soon(FULL_SECONDS, empty)

    def _jump_clock(self) -> None:
        self._host.clock.wall_error += float(self._rng.choice([-86400.0, -3600.0, 3600.0]))
