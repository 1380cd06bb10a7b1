"""A simulated trainer: leases, trains for some seconds, commits, publishes, checkpoints."""

import asyncio
from collections.abc import Sequence

import numpy as np

from service.handoff.verbs import Wait, WaitReason
from service.types import MiniBatch, PolicyVersion, Refusal
from tests.sim.generator import Generator
from tests.sim.host import POLL_SECONDS, Client, Host
from tests.sim.scenario import Scenario


class Trainer(Client):
    """All ranks of the trainer, simulated as one process."""

    def __init__(
        self,
        generators: Sequence[Generator],
        host: Host,
        scenario: Scenario,
        rng: np.random.Generator,
    ) -> None:
        super().__init__(host, scenario, rng)
        self.version = PolicyVersion(0, 0)
        self.published = self.version
        """The version that engines are to serve."""
        self.drained = False
        """Whether the buffer has answered that no more mini-batches can come."""
        self._settings = host.settings
        self._generators = generators
        self.step_seconds = scenario.step_seconds(host.settings)
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

    async def _report_checkpoint(self) -> None:
        await self.ask(lambda buffer: buffer.covered(self._checkpoint))

    async def _train(self) -> None:
        """Join; then lease, train and commit one mini-batch after the other until the buffer is drained."""
        step = self._checkpoint
        incarnation: int = await self.ask(lambda buffer: buffer.join("trainer", "trainer", step))
        self.version = PolicyVersion(incarnation, step)
        self._host.witness.went_back(step)
        self._publish()
        since = self.loop.now
        while not self.drained:
            answer = await self.ask(lambda buffer: buffer.lease(incarnation), POLL_SECONDS)
            if isinstance(answer, MiniBatch):
                self._host.witness.leased(answer, self.loop.now - since)
                await asyncio.sleep(self.step_seconds)
                answer = await self._step(answer)
                since = self.loop.now
            elif isinstance(answer, Wait):
                self.drained = answer.reason is WaitReason.DRAINED
            if isinstance(answer, Refusal):
                # A refused commit: the weights contain a step that the buffer does not have. Both agree at the
                # checkpoint.
                self.start()
                return

    async def _step(self, batch: MiniBatch) -> Refusal | None:
        """Commit a trained mini-batch, or release it if its optimizer step was not applied; returns the refusal of the
        commit, or None."""
        incarnation, step = self.version
        faults = self._host.faults
        if self.loop.now < faults.until and self._rng.random() < faults.bad_steps:
            await self.ask(lambda buffer: buffer.release(incarnation, batch.lease, "not finite"))
            return None
        version = PolicyVersion(incarnation, step + 1)
        refusal: Refusal | None = await self.ask(lambda buffer: buffer.commit(incarnation, batch.lease, version))
        if refusal is not None:
            return refusal
        self.version = version
        self._host.witness.committed(version, batch, self.loop.now)
        if version.step % self._settings.sync_every == 0:
            self._publish()
        if self._settings.checkpoint_every and version.step % self._settings.checkpoint_every == 0:
            self.save()
        return None

    def _publish(self) -> None:
        """Send the weights to every engine, without waiting for their arrival."""
        self.published = self.version
        for generator in self._generators:
            self.run(self._send_weights(generator, self.version))

    async def _send_weights(self, generator: Generator, version: PolicyVersion) -> None:
        if self._scenario.sync_seconds:
            await asyncio.sleep(self._scenario.sync_seconds)
            generator.update(version)
        else:
            await self.call(lambda reply: reply(generator.update(version)))
