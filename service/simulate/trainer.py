"""A simulated trainer: leases, trains for some seconds, commits, publishes, checkpoints; it may die at any point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from service.config import Config
from service.handoff.verbs import Wait, WaitReason
from service.simulate.generator import SimulatedGenerator
from service.simulate.host import Host
from service.simulate.network import Call, Network
from service.simulate.scenario import Scenario
from service.simulate.witness import Witness
from service.types import MiniBatch, PolicyVersion, Refusal

POLL_SECONDS = 5.0
PATIENCE_SECONDS = 8.0


class SimulatedTrainer:
    """The trainer group as one process."""

    def __init__(
        self,
        config: Config,
        scenario: Scenario,
        seconds: float,
        host: Host,
        network: Network,
        generators: Sequence[SimulatedGenerator],
        witness: Witness,
        rng: np.random.Generator,
    ) -> None:
        self.version = PolicyVersion(0, 0)
        self.drained = False
        """Whether the buffer answered that no more mini-batches can come."""
        self._config = config
        self._scenario = scenario
        self._seconds = seconds
        self._host = host
        self._loop = host.loop
        self._network = network
        self._generators = generators
        self._witness = witness
        self._rng = rng
        self._life = 0
        self._checkpoint = 0
        """The step of the newest durable checkpoint."""

    def start(self) -> None:
        """Join at the newest checkpoint."""
        self._life += 1
        step = self._checkpoint

        def joined(incarnation: int) -> None:
            self.version = PolicyVersion(incarnation, step)
            self._witness.went_back(step)
            self._publish()
            self._lease(self._loop.now)

        self._call(lambda reply: self._host.ask(lambda b: b.join("trainer", "trainer", step), reply), joined)

    def die(self) -> None:
        """End as by kill -9; `start` begins the next life."""
        self._life += 1

    def save(self) -> None:
        """Write a checkpoint, which is durable at once, and report it to the buffer."""
        self._checkpoint = self.version.step
        self._call(
            lambda reply: self._host.ask(lambda buffer: buffer.covered(self._checkpoint), reply), lambda answer: None
        )

    def _lease(self, since: float) -> None:
        incarnation = self.version.incarnation

        def answered(answer: MiniBatch | Wait | Refusal) -> None:
            if isinstance(answer, MiniBatch):
                self._witness.leased(answer, self.version, self._loop.now - since)
                self._loop.after(self._seconds, self._in_this_life(lambda: self._step(answer)))
            elif isinstance(answer, Refusal):
                self.start()
            elif answer.reason is WaitReason.DRAINED:
                self.drained = True
            else:
                self._lease(since)

        self._call(
            lambda reply: self._host.poll(lambda buffer: buffer.lease(incarnation), POLL_SECONDS, reply), answered
        )

    def _step(self, batch: MiniBatch) -> None:
        incarnation = self.version.incarnation
        if self._rng.random() < self._scenario.faults.bad_steps and self._loop.now < self._scenario.faults.until:
            self._call(
                lambda reply: self._host.ask(lambda b: b.release(incarnation, batch.lease, "not finite"), reply),
                lambda answer: self._lease(self._loop.now),
            )
            return
        version = PolicyVersion(incarnation, self.version.step + 1)

        def answered(answer: Refusal | None) -> None:
            if isinstance(answer, Refusal):
                # The weights hold a step that the buffer does not: only the checkpoint is common to both.
                self.start()
                return
            self.version = version
            self._witness.committed(version, batch)
            if version.step % self._config.weights.sync_every == 0:
                self._publish()
            if self._config.trainer.checkpoint_every and version.step % self._config.trainer.checkpoint_every == 0:
                self.save()
            self._lease(self._loop.now)

        self._call(
            lambda reply: self._host.ask(lambda buffer: buffer.commit(incarnation, batch.lease, version), reply),
            answered,
        )

    def _publish(self) -> None:
        """Send the weights to every engine, again and again until it has them."""
        for generator in self._generators:
            self._send_weights(generator, self.version)

    def _send_weights(self, generator: SimulatedGenerator, version: PolicyVersion) -> None:
        if self._scenario.sync_seconds:
            self._loop.after(self._scenario.sync_seconds, lambda: generator.update(version))
            return

        def deliver(reply: Callable[[Any], None]) -> None:
            generator.update(version)
            reply(None)

        self._call(deliver, lambda answer: None)

    def _call(self, request: Callable[[Callable[[Any], None]], None], answered: Callable[[Any], None]) -> None:
        life = self._life
        Call(self._network, request, PATIENCE_SECONDS).start(answered, lambda: self._life == life)

    def _in_this_life(self, callback: Callable[[], None]) -> Callable[[], None]:
        life = self._life

        def run() -> None:
            if self._life == life:
                callback()

        return run
