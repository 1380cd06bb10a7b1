"""Worlds from seeds, calm or full of faults: work, faults, drain, and a check of the promises throughout.

    generators --requests--> NETWORK --> HOST (the real Buffer and Journal) <-- NETWORK <--requests-- trainer
                             delays, losses,     on a disk in memory that
                             doubles             fills up and loses power

`fault_world` draws settings and faults from a seed.
"""

from collections.abc import Callable, Sequence

import numpy as np

from service.config import Config, load_config
from service.errors import RunFailed
from service.handoff.ledger.events import GroupState
from tests.sim.disk import AMPLE_ROOM
from tests.sim.faults import Faults, Network
from tests.sim.generator import Generator
from tests.sim.host import Host
from tests.sim.loop import Loop
from tests.sim.scenario import Scenario, SimulationSettings
from tests.sim.trainer import Trainer

HANG_SECONDS = 600.0
"""A run hangs if it takes no optimizer step and ends no group for this many simulated seconds more than the longest
regular pause: the seconds of the longest trajectory, its scorers, an optimizer step, and the
arrival of the step's weights."""
HANG_GROUPS = 100
"""A run hangs too if this many groups in a row end untrained, without a complete group between them."""
LOOK_SECONDS = 7.0
FAULT_SECONDS = 25.0
# Means of exponentially distributed times.
RESTART_SECONDS = 2.0
FREEZE_SECONDS = 15.0
FULL_SECONDS = 8.0
NOTICE_SECONDS = 3.0


class World:
    """One simulated run, with independent streams of faults until `Faults.until`; all random numbers are drawn from one
    seed. Every process that died starts again."""

    def __init__(
        self,
        settings: SimulationSettings,
        scenario: Scenario,
        seed: int,
        faults: Faults | None = None,
        segment_bytes: int = 64 << 20,
    ) -> None:
        self.settings, self.scenario, self.seed, self.faults = settings, scenario, seed, faults or Faults()
        self.fault_count = 0
        """Faults so far."""
        rngs = [np.random.default_rng((seed, part)) for part in range(6)]
        self.loop, self._rng = Loop(), rngs[0]
        network = Network(self.loop, rngs[2], self.faults.delay, self.faults.lost, self.faults.doubled)
        self.host = Host(settings, scenario, self.faults, network, (rngs[1], rngs[5]), segment_bytes)
        self.witness = self.host.witness
        self.host.start()
        self.generators = [Generator(f"g{n}", self.host, scenario, rngs[3]) for n in range(scenario.generators)]
        self.trainer = Trainer(self.generators, self.host, scenario, rngs[4])
        self.patience = (
            HANG_SECONDS
            + 2 * scenario.longest(settings) * scenario.token_seconds
            + max((scorer.attempts * scorer.deadline for scorer in settings.scorers.values()), default=0.0)
            + self.trainer.step_seconds
            + scenario.sync_seconds
        )

    def run(self) -> None:
        """Train until the scenario's number of optimizer steps, end all faults, drain the buffer, and check the
        promises.

        Raises:
            Broken: a promise was broken. Every exception carries the seed as a note.
            RunFailed: the run hangs.
        """
        try:
            self.begin()
            self._until(lambda: self.trainer.version.step >= self.scenario.steps)
            self._until(lambda: self.loop.now > self.faults.until and self.host.alive)
            self.host.buffer.drain("max_steps")
            self.host.look_soon()
            self._until(lambda: self.trainer.drained)
            self.trainer.save()
            self._until(lambda: self.host.buffer.ledger.state.covered == self.trainer.version.step)
            self.host.buffer.end()
            self.witness.look(self.host.buffer)
            self.witness.check_the_end(self.host.buffer)
        except BaseException as error:  # also a bug's, and an interrupt's: the seed repeats what led to it
            error.add_note(f"seed {self.seed}")
            raise
        finally:
            self.loop.end()

    def _until(self, done: Callable[[], bool]) -> None:
        """Advance time until `done()` is true; raises RunFailed if the simulated run hangs."""
        begun = since = self.loop.now
        useful, ended, ended_before = (0, 0), 0, 0

        def stuck() -> bool:
            nonlocal since, useful, ended, ended_before
            ledger, earlier = self.host.buffer.ledger, (useful, ended)
            complete = ledger.state.next_finished - ledger.in_state[GroupState.FILTERED]
            useful, ended = (len(self.witness.committed_at), complete), ledger.state.vacated
            if self.loop.now < self.faults.until or (useful, ended) != earlier:
                since = self.loop.now
            if self.loop.now < self.faults.until or useful != earlier[0]:
                ended_before = ended
            return self.loop.now - since > self.patience or ended - ended_before > HANG_GROUPS

        if not self.loop.run(lambda: done() or stuck()):
            raise RunFailed(f"no event is left at {self.loop.now:.0f} s; {self._where()}")
        if not done():
            seconds = self.loop.now - max(begun, self.faults.until, *self.witness.committed_at[-1:])
            raise RunFailed(f"no optimizer step for {seconds:.0f} s; {self._where()}")

    def _where(self) -> str:
        status = self.host.buffer.status()
        waits = "; ".join(f"{wait.who} waits: {wait.detail}" for wait in status.waits)
        return f"version {status.policy_version}, groups {status.groups}, refused {status.refused}, {waits}"

    def _look(self) -> None:
        """Compare buffer and witness at regular times."""
        if self.host.alive:
            self.witness.look(self.host.buffer)
        self.loop.after(LOOK_SECONDS, self._look)

    def begin(self) -> None:
        """Start all processes, schedule every stream of faults, and the end of all faults."""
        self.trainer.start()
        for generator in self.generators:
            generator.start()
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
        generator = Generator(free, self.host, self.scenario, self._rng)
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

    def _some_generator(self) -> Generator | None:
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
    )
    faults = Faults.drawn(rng, FAULT_SECONDS)
    settings, segment_bytes = SimulationSettings.of(_config(rng)), int(rng.choice([1, 3_000, 1 << 20]))
    return World(settings, scenario, seed, faults, segment_bytes)


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
