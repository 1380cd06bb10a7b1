"""Worlds full of faults, from seeds: work, faults, drain, and a check of the promises throughout.

    generators --requests--> NETWORK --> HOST (the real Buffer and Journal) <-- NETWORK <--requests-- trainer
                             delays, losses,     on a disk in memory that
                             doubles             fills up and loses power

`fault_world` draws settings and faults from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from service.config import Config, load_config
from tests.sim.calm_world import World
from tests.sim.faults import AMPLE_ROOM, Faults, Network
from tests.sim.host import Host
from tests.sim.measurements import Measurements
from tests.sim.processes import FaultyGenerator, FaultyHost, FaultyTrainer
from tests.sim.scenario import Scenario, SimulationSettings
from tests.sim.witness import Witness

LOOK_SECONDS = 7.0
FAULT_SECONDS = 25.0
# Means of exponentially distributed times.
RESTART_SECONDS = 2.0
FREEZE_SECONDS = 15.0
FULL_SECONDS = 8.0
NOTICE_SECONDS = 3.0


class FaultyWorld(World):
    """A world with independent streams of faults until `Faults.until`; every process that died starts again."""

    witness: Witness
    host: FaultyHost
    trainer: FaultyTrainer
    generators: list[FaultyGenerator]  # type: ignore[assignment]
    generator_class, trainer_class = FaultyGenerator, FaultyTrainer

    def __init__(
        self, settings: SimulationSettings, scenario: Scenario, faults: Faults, seed: int, segment_bytes: int = 64 << 20
    ) -> None:
        self.faults, self._segment_bytes, self.calm_from = faults, segment_bytes, faults.until
        self.fault_count = 0
        """Faults so far."""
        super().__init__(settings, scenario, seed)
        self._rng = self.rngs[0]

    def new_measurements(self) -> Measurements:
        self.witness = Witness(self.settings)
        return self.witness

    def new_host(self) -> Host:
        network = Network(self.loop, self.rngs[2], self.faults.delay, self.faults.lost, self.faults.doubled)
        rngs, witness = (self.rngs[1], self.rngs[5]), self.witness
        return FaultyHost(self.settings, self.scenario, self.faults, network, witness, rngs, self._segment_bytes)

    def run(self) -> None:
        """Run, end all faults, and check the promises.

        Raises:
            Broken: a promise was broken. Every exception carries the seed as a note.
        """
        try:
            super().run()
            self.witness.look(self.host.buffer)
            self.witness.check_the_end(self.host.buffer)
        except BaseException as error:  # also a bug's, and an interrupt's: the seed repeats what led to it
            error.add_note(f"seed {self.seed}")
            raise
        finally:
            self.host.scorers.end()
            self.loop.run(lambda: self.host.scorers.ended)

    def _look(self) -> None:
        """Compare buffer and witness at regular times."""
        if self.host.alive:
            self.witness.look(self.host.buffer)
        self.loop.after(LOOK_SECONDS, self._look)

    def begin(self) -> None:
        """Start all processes, schedule every stream of faults, and the end of all faults."""
        super().begin()
        self._look()
        faults = self.faults
        self.host.on_death = lambda: self._soon(RESTART_SECONDS, self.host.start)
        for rate, fault in (
            (faults.buffer_deaths, self._kill_buffer),
            (faults.generator_deaths, self._kill_generator),
            (faults.generator_freezes, self._freeze_generator),
            (faults.generator_leaves, self._replace_generator),
            (faults.trainer_deaths, self._kill_trainer),
            (faults.disk_full, self._fill_disk),
            (faults.clock_jumps, self._jump_clock),
        ):
            if rate:
                self._next(rate, fault)
        self.loop.after(faults.until, self._heal)

    def _next(self, rate: float, fault: Callable[[], None]) -> None:
        def strike() -> None:
            if self.loop.now < self.faults.until:
                self.fault_count += 1
                fault()
                self._next(rate, fault)

        self._soon(1.0 / rate, strike)

    def _soon(self, mean_seconds: float, callback: Callable[[], None]) -> None:
        self.loop.after(float(self._rng.exponential(mean_seconds)), callback)

    def _heal(self) -> None:
        self.host.network.heal()
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
        if (generator := self._some_generator()) is None:
            return
        generator.die()
        self._notice(generator.name)
        self._soon(RESTART_SECONDS, lambda: generator.start() if generator in self.generators else None)

    def _replace_generator(self) -> None:
        """One generator leaves, and one joins, under a new name or under that of one that left."""
        if (leaving := self._some_generator()) is None:
            return
        self.generators.remove(leaving)
        leaving.leave()
        self._soon(RESTART_SECONDS, self._join_generator)

    def _join_generator(self) -> None:
        names = {generator.name for generator in self.generators}
        free = next(name for number in range(len(names) + 1) if (name := f"g{number}") not in names)
        generator = FaultyGenerator(free, self.host, self.scenario, self._rng, self.measured)
        generator.update(self.trainer.published)
        self.generators.append(generator)
        generator.start()

    def _freeze_generator(self) -> None:
        if (generator := self._some_generator()) is None:
            return
        generator.freeze(float(self._rng.exponential(FREEZE_SECONDS)))
        self._notice(generator.name)

    def _notice(self, name: str) -> None:
        """In half of all cases a supervisor reports a generator that stopped; in the others only deadlines help."""

        def leave() -> None:
            if self.host.alive and (member := self.host.buffer.ledger.state.generators.get(name)) is not None:
                self.host.buffer.leave(name, member.incarnation, "no heartbeat")

        if self._rng.random() < 0.5:
            self._soon(NOTICE_SECONDS, leave)

    def _some_generator(self) -> FaultyGenerator | None:
        """None while all of them have left."""
        return self.generators[int(self._rng.integers(len(self.generators)))] if self.generators else None

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
    )
    faults = Faults.drawn(rng, FAULT_SECONDS)
    settings, segment_bytes = SimulationSettings.of(_config(rng)), int(rng.choice([1, 3_000, 1 << 20]))
    return FaultyWorld(settings, scenario, faults, seed, segment_bytes)


_JUDGE = "use: 'mine:judge', workers: 2, deadline: 5, attempts: 3"
_TEACHER = "kind: teacher, url: http://teacher, tokenizer: /teacher, workers: 3, deadline: 5"
_SCORERS: Sequence[Sequence[str]] = (
    (),
    (f"scorers={{judge: {{{_JUDGE}}}}}",),
    (f"scorers={{judge: {{{_JUDGE}, combine: add, fallback: environment_reward}}}}",),
    (
        f"scorers={{judge: {{{_JUDGE}}}, teacher: {{{_TEACHER}}}}}",
        "algorithm.teacher={}",
        "algorithm.filter_zero_variance=false",
    ),
)
"""Settings of the scorers of a world."""


def _config(rng: np.random.Generator) -> Config:
    lookahead = rng.integers(0, 4)
    settings = [
        "env.max_turns=3",
        "generator.max_input_length=256",
        "generator.max_generate_length=64",
        "generator.concurrent_groups=6",
        f"buffer.lookahead={lookahead}",
        f"buffer.max_staleness={rng.integers(lookahead, 6)}",
        f"buffer.order={rng.choice(['finished_first', 'strict'])}",
        "buffer.step_deadline=8.0",
        "buffer.lease_deadline=20.0",
        "buffer.max_attempts=20",
        "buffer.max_lease_attempts=10",
        f"algorithm.filter_zero_variance={bool(rng.integers(2))}",
        "trainer.mini_batch_size=2",
        f"trainer.ranks={rng.integers(1, 3)}",
        "trainer.max_tokens_per_micro_batch=1024",
        f"trainer.checkpoint_every={rng.integers(1, 4)}",
    ]
    scorers = _SCORERS[int(rng.integers(len(_SCORERS)))]
    samples = 3 if scorers else 2  # a bad reward leaves two
    return load_config([], [*settings, *scorers, f"algorithm.n_samples_per_prompt={samples}"])
