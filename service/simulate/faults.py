"""Worlds full of faults: what goes wrong and when is drawn from the world's seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.config import Config
from service.simulate.disk import AMPLE_ROOM
from service.simulate.generator import SimulatedGenerator
from service.simulate.scenario import Faults, Scenario
from service.simulate.world import World

FAULT_SECONDS = 25.0
# Means of exponentially distributed times.
RESTART_SECONDS = 2.0
FREEZE_SECONDS = 15.0
FULL_SECONDS = 8.0
NOTICE_SECONDS = 3.0


class FaultyWorld(World):
    """A world with independent streams of faults until `Faults.until`; every process that died starts again."""

    def __init__(self, config: Config, scenario: Scenario, seed: int, segment_bytes: int) -> None:
        super().__init__(config, scenario, seed, segment_bytes)
        self.fault_count = 0
        """Faults so far."""
        self._rng = np.random.default_rng((seed, 0))

    def begin(self) -> None:
        """Start all processes, schedule every stream of faults, and the end of all faults."""
        super().begin()
        faults = self.scenario.faults
        self.host.on_death = lambda: self._soon(RESTART_SECONDS, self.host.start)
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
        self.loop.after(faults.until, self._heal)

    def is_calm(self) -> bool:
        """Whether no more faults come and the buffer runs."""
        return self.loop.now >= self.scenario.faults.until and self.host.alive and not self.host.doom

    def _next(self, rate: float, fault: Callable[[], None]) -> None:
        def strike() -> None:
            if self.loop.now < self.scenario.faults.until:
                self.fault_count += 1
                fault()
                self._next(rate, fault)

        self._soon(1.0 / rate, strike)

    def _soon(self, mean_seconds: float, callback: Callable[[], None]) -> None:
        self.loop.after(float(self._rng.exponential(mean_seconds)), callback)

    def _heal(self) -> None:
        self.network.heal()
        self.host.disk.room = AMPLE_ROOM
        self.host.doom = None

    def _kill_buffer(self) -> None:
        """Kill the buffer now, or when it next comes to a named seam."""
        if not self.host.alive:
            return
        seam = self._rng.integers(3)
        if seam == 0:
            self.host.die()
        else:
            self.host.doom = ("before_sync" if seam == 1 else "after_sync", int(self._rng.integers(8)))

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
            if self.host.alive and (member := self.host.buffer.ledger.state.generators.get(name)) is not None:
                self.host.buffer.leave(name, member.incarnation, "no heartbeat")

        if self._rng.random() < 0.5:
            self._soon(NOTICE_SECONDS, leave)

    def _some_generator(self) -> SimulatedGenerator:
        return self.generators[int(self._rng.integers(len(self.generators)))]

    def _kill_trainer(self) -> None:
        self.trainer.die()
        self._soon(RESTART_SECONDS, self.trainer.start)

    def _fill_disk(self) -> None:
        disk = self.host.disk
        disk.room = disk.used() + int(self._rng.integers(4096))

        def empty() -> None:
            disk.room = AMPLE_ROOM

        self._soon(FULL_SECONDS, empty)

    def _jump_clock(self) -> None:
        self.host.clock.wall_error += float(self._rng.choice([-86400.0, -3600.0, 3600.0]))


def fault_world(seed: int) -> FaultyWorld:
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
    return FaultyWorld(_config(rng), scenario, seed, segment_bytes=int(rng.choice([1, 3_000, 1 << 20])))


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
