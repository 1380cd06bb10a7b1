"""The simulated processes with faults: a buffer that dies, a network, bad steps and turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from service.handoff.steps.values import Role, StopReason
from service.handoff.verbs import Claim, Receipt
from service.types import Refusal, RefusalReason, TrajectoryId
from tests.sim.faults import Faults, FaultyDisk, Network
from tests.sim.generator import SimulatedGenerator
from tests.sim.host import Client, Host
from tests.sim.loop import Activity, Resume, Waiting
from tests.sim.scenario import Scenario, SimulationSettings
from tests.sim.scorers import FaultyScorers
from tests.sim.trainer import SimulatedTrainer
from tests.sim.witness import Witness

RETRY_SECONDS = 8.0
"""A client sends a request again when no answer came for this time."""


class FaultyHost(Host):
    """The buffer's process: it may die at any time, and comes back with what its disk kept."""

    def __init__(
        self,
        settings: SimulationSettings,
        scenario: Scenario,
        faults: Faults,
        network: Network,
        witness: Witness,
        rngs: tuple[np.random.Generator, np.random.Generator],
        segment_bytes: int,
    ) -> None:
        """`rngs`: of the process and of its scorers."""
        super().__init__(settings, scenario, network.loop, rngs[1], segment_bytes)
        self.disk: FaultyDisk = FaultyDisk()
        self.network, self.witness, self.faults = network, witness, faults
        self.alive = False
        self.on_death: Callable[[], None] = lambda: None
        self.doom: tuple[str, int] | None = None
        """The seam at which to die, `before_sync` or `after_sync`, and how many passes of it to survive first."""
        self.answers = self.bad_answers = 0
        """Of all scorers so far."""
        self._deaths = rngs[0]

    def start(self, now: float = 0.0) -> None:
        """Start a new process on the disk's files; its monotonic clock starts at a random time."""
        self.alive = True
        super().start(float(self._deaths.uniform(0, 1e6)))
        self.witness.look(self.buffer)
        self.witness.scored(self.buffer)

    def new_scorers(self) -> FaultyScorers:  # type: ignore[override]
        return FaultyScorers(self, self._scenario.scorer_seconds, self._rng)

    def die(self) -> None:
        """End as by kill -9 and loss of power: unsynced bytes are lost and no more answers are sent."""
        super().die()
        self.alive = False
        self.scorers.end()  # type: ignore[attr-defined]
        self._unsynced, self._polls, self._sync_is_due = [], [], False
        self.claims.take()
        self.disk.lose_power(self._deaths)
        self.on_death()

    def ask(self, request: Callable[[Any], Any], reply: Resume, patience: float = 0.0) -> None:
        if self.alive:
            super().ask(request, reply, patience)

    def claim(self, claim: Claim, reply: Resume) -> None:
        if self.alive:
            super().claim(claim, reply)

    def passes(self, seam: str) -> bool:
        """Count down to the death at this seam."""
        if seam == "after_sync" and self.journal.synced == self.journal.position:
            self.witness.scored(self.buffer)
        if self.alive and self.doom is not None and self.doom[0] == seam:
            self.doom = (seam, self.doom[1] - 1) if self.doom[1] > 0 else None
            if self.doom is None:
                self.die()
        return self.alive


class FaultyClient(Client):
    """A client whose messages are delayed, lost and doubled, and who sends them again."""

    _host: FaultyHost

    def call(self, request: Callable[[Resume], None]) -> Waiting:
        """Send a request, again and again until its answer comes.

        An answer to a client that died meanwhile is ignored: its activity is never resumed.
        """
        life, answered, network = self.life, False, self._host.network

        def begin(resume: Resume) -> None:
            def receive(answer: Any) -> None:
                nonlocal answered
                if not answered:
                    answered = True
                    resume(answer)

            def send() -> None:
                if answered or self.life != life:
                    return
                self._host.network.send(
                    lambda: request(lambda answer: self._host.network.send(lambda: receive(answer)))
                )
                if network.delay:
                    self.loop.after(RETRY_SECONDS, send)

            send()

        return begin


class FaultyGenerator(FaultyClient, SimulatedGenerator):
    """A generator that may leave, fall silent, fail or lose responses."""

    _leaves = False

    def silence(self) -> float:
        faults = self._host.faults
        return faults.until if self._rng.random() < faults.silent and self.loop.now < faults.until else 0.0

    def role_of_turn(self) -> Role:
        undelivered = self._host.faults.undelivered
        return Role.UNDELIVERED if undelivered > 0 and self._rng.random() < undelivered else Role.MAIN

    def stop_reason(self) -> StopReason:
        failing = self._host.faults.failing
        return StopReason.ENVIRONMENT_ERROR if failing > 0 and self._rng.random() < failing else StopReason.STOP

    def acknowledged(self, steps: list[tuple[TrajectoryId, int]], receipt: Receipt) -> None:
        for of, step in steps:
            if of not in receipt.late:
                self._host.witness.acknowledged(of, step)

    def _refused(self, refusal: Refusal) -> None:
        if refusal.reason is not RefusalReason.FENCED:
            self._host.witness.refused(refusal)
        elif not self._leaves:
            self.start()

    def leave(self) -> None:
        """Claim and play no more, send the steps that are finished, and hand the others over."""
        self.die()
        self._leaves = True
        self.run(self._leave(), self.die)

    def _leave(self) -> Activity:
        incarnation = self._incarnation
        if self._unsent:
            yield self.all_of([self._send()])
        yield self.ask(lambda buffer: buffer.leave(self.name, incarnation, "leaves"))


class FaultyTrainer(FaultyClient, SimulatedTrainer):
    """A trainer some of whose steps are not applied."""

    def is_applied(self) -> bool:
        faults = self._host.faults
        return not (self._rng.random() < faults.bad_steps and self.loop.now < faults.until)
