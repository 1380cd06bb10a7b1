"""A simulated trainer: leases, trains for some seconds, commits, publishes, checkpoints."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from service.handoff.verbs import Wait, WaitReason
from service.types import MiniBatch, PolicyVersion, Refusal
from tests.sim.generator import SimulatedGenerator
from tests.sim.host import POLL_SECONDS, Client, Host
from tests.sim.loop import Activity, Resume, Waiting
from tests.sim.measurements import Measurements
from tests.sim.scenario import Scenario


class SimulatedTrainer(Client):
    """All ranks of the trainer, simulated as one process."""

    def __init__(
        self,
        generators: Sequence[SimulatedGenerator],
        host: Host,
        scenario: Scenario,
        rng: np.random.Generator,
        measured: Measurements,
    ) -> None:
        super().__init__(host, scenario, rng)
        self._measured = measured
        self.version = PolicyVersion(0, 0)
        self.published = self.version
        """The version that engines are to serve."""
        self.drained = False
        """Whether the buffer has answered that no more mini-batches can come."""
        self._settings = host.settings
        self._generators = generators
        self.step_seconds = scenario.step_seconds(host.settings)
        self.evaluated: list[tuple[int, float]] = []
        """(optimizer step, seconds) of the evaluations that have ended."""
        self._evaluating = 0
        """Number of generators that evaluate now."""
        self._checkpoint = 0
        """The optimizer step of the newest durable checkpoint."""

    def start(self) -> None:
        """Join the run at the newest checkpoint, then train."""
        self.die()
        self.run(self._train())

    def save(self) -> None:
        """Write a checkpoint, which is durable at once, and report it to the buffer."""
        self._checkpoint = self.version.step
        self.run(self._report_checkpoint())

    def _report_checkpoint(self) -> Activity:
        yield self.ask(lambda buffer: buffer.covered(self._checkpoint))

    def _train(self) -> Activity:
        """Join; then lease, train and commit one mini-batch after the other until the buffer is drained."""
        step = self._checkpoint
        incarnation: int = yield self.ask(lambda buffer: buffer.join("trainer", "trainer", step))
        self.version = PolicyVersion(incarnation, step)
        self._measured.went_back(step)
        self._publish()
        since = self.loop.now
        while not self.drained:
            answer = yield self.ask(lambda buffer: buffer.lease(incarnation), POLL_SECONDS)
            if isinstance(answer, MiniBatch):
                self._measured.leased(answer, self.version, self.loop.now - since)
                yield self.wait(self.step_seconds)
                answer = yield from self._step(answer)
                since = self.loop.now
            elif isinstance(answer, Wait):
                self.drained = answer.reason is WaitReason.DRAINED
            if isinstance(answer, Refusal):
                # A refused commit: the weights contain a step that the buffer does not have. Both agree at the
                # checkpoint.
                self.start()
                return

    def _step(self, batch: MiniBatch) -> Generator[Waiting, Any, Refusal | None]:
        """Commit a trained mini-batch, or release it if its optimizer step was not applied; returns the refusal of the
        commit, or None."""
        incarnation, step = self.version
        if not self.is_applied():
            yield self.ask(lambda buffer: buffer.release(incarnation, batch.lease, "not finite"))
            return None
        version = PolicyVersion(incarnation, step + 1)
        refusal: Refusal | None = yield self.ask(lambda buffer: buffer.commit(incarnation, batch.lease, version))
        if refusal is not None:
            return refusal
        self.version = version
        self._measured.committed(version, batch, self.loop.now)
        if version.step % self._settings.sync_every == 0:
            self._publish()
        yield from self._evaluate(step + 1)
        if self._settings.checkpoint_every and version.step % self._settings.checkpoint_every == 0:
            self.save()
        return None

    def is_applied(self) -> bool:
        """Whether the next optimizer step is applied: true, unless a test overrides this to simulate a loss or gradient
        that is not finite."""
        return True

    def _evaluate(self, step: int) -> Generator[Waiting, Any, None]:
        """Evaluate every `data.eval_every` optimizer steps, on all engines while training waits."""
        data, evaluators = self._settings.data, self._evaluators
        if not data.eval_every or step % data.eval_every or self._evaluating:
            return
        self._evaluating, since = len(evaluators), self.loop.now

        def begin(resume: Resume) -> None:
            def ended() -> None:
                self._evaluating -= 1
                if not self._evaluating:
                    self.evaluated.append((step, self.loop.now - since))
                    resume(None)

            for generator in evaluators:
                generator.evaluate(self.evaluation_share, ended)

        yield begin

    @property
    def _evaluators(self) -> Sequence[SimulatedGenerator]:
        return self._generators

    @property
    def evaluation_share(self) -> int:
        """Number of trajectories that each evaluating generator plays; 0 if the run has no evaluations."""
        data = self._settings.data
        sizes = [size for size in (data.eval_make_rows, data.eval_rows) if size is not None]
        n_trajectories = min(sizes, default=0) * data.eval_samples if data.eval_every else 0
        return -(-n_trajectories // len(self._evaluators))

    def _publish(self) -> None:
        """Send the weights to every engine, without waiting for their arrival."""
        self.published = self.version
        for generator in self._generators:
            self.run(self._send_weights(generator, self.version))

    def _send_weights(self, generator: SimulatedGenerator, version: PolicyVersion) -> Activity:
        if self._scenario.sync_seconds:
            yield self.wait(self._scenario.sync_seconds)
            generator.update(version)
        else:
            yield self.call(lambda reply: reply(generator.update(version)))
