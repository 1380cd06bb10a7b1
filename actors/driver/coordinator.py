"""The driver's loop: lease -> step -> commit -> publish, while the generators continue.

Its parts (no part imports another part, or the loop):

- buffer (actor): leases mini-batches, and records which steps were committed
- trainer (`TrainerGroup`): takes optimizer steps, saves and restores, gives out the weights
- `GeneratorPool`: starts and restarts generators; its `weights` (`Delivery`) bring each publication to the engines
- `Scaling` with `HostWatch`: lets generators join, and leave with their nodes
- `Checkpointer`: writes checkpoints, and hands them to the uploads
- `Evaluations`: evaluates the published weights
- `Supervisor`: detects dead processes, and cancels the calls that wait for them
- `RunObserver`: records metrics, the status and the progress
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray.exceptions

from actors.buffer.actor import LeasedBatch
from actors.calls import accepted, call, in_a_line, started
from actors.deaths import cause_of_death, is_death, life_of
from actors.driver.checkpointer import Checkpointer
from actors.driver.cluster import Cluster
from actors.driver.host_watch import HostWatch
from actors.driver.observer import RunObserver
from actors.evaluation.during_training import Evaluations
from actors.generator.generator_pool import GeneratorPool
from actors.generator.scaling import Scaling
from actors.observe.hub_port import DEFAULT_PORT
from actors.weights.part import TRAINER, TrainerLost
from service.config import Config, resolved_yaml
from service.errors import BatonError, ProcessLost, RunFailed
from service.handoff.verbs import WaitReason
from service.run.checkpoints import Manifest
from service.run.folder import BEST, FINAL
from service.run.liveness.supervisor import Supervisor
from service.run.phases import phase
from service.run.preparing.inputs import Prepared, demonstrations
from service.run.records.progress import QUIET_SECONDS, end_early
from service.run.records.writer import RunWriter
from service.store.uploads import Uploads
from service.types import PolicyVersion

POLL_SECONDS = 2.0
"""Seconds of one long poll for a mini-batch. Between two polls the driver checks for a stop signal."""

ask_buffer = partial(call, who="the buffer")


class Coordinator:
    """Controls one run from the start of its actors to its summary; `stop` ends the run cleanly."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        folder: RunWriter,
        prepared: Prepared,
        say: Callable[[str], None],
        resume_from: Manifest | None,
        uploads: Uploads | None = None,
    ) -> None:
        self._config = config
        self._hub, self._buffer, self._trainer = cluster.hub, cluster.buffer, cluster.trainer
        self._further = cluster.starting
        self._folder = folder
        self._prepared = prepared
        self._say = say
        self._resume_from = resume_from
        self.stopped_by = 0
        """Number of the stop signal that ends the run; 0: no signal came."""
        self._supervised, self._supervisor = cluster.named, Supervisor(say, cause_of_death, is_death)
        self._observer = RunObserver(config, cluster, folder, say, uploads, self._supervisor)
        self._telemetry, self._progress = self._observer.telemetry, self._observer.progress
        self._generator_pool = GeneratorPool(
            config.generator,
            config.run,
            config.weights,
            cluster.generators,
            cluster.trainer,
            self._telemetry,
            say,
            self._supervisor,
            cluster.buffer,
        )
        self._weights = self._generator_pool.weights
        self._scaling = Scaling(
            config.generator, config.run, config.weights.transport, self._generator_pool, cluster.place, say
        )
        self._hosts = HostWatch(say, self._scaling.look)
        checkpointed, evaluated = (partial(self._telemetry.span, row) for row in ("checkpoints", "evaluations"))
        self._checkpoints = Checkpointer(config, folder.path, cluster, checkpointed, uploads)
        eval_files, stopped = prepared.eval_files, lambda: bool(self.stopped_by)
        sections = config.data, config.run, config.weights.sync_every
        self._evaluations = Evaluations(*sections, self._generator_pool, folder, eval_files, say, stopped, evaluated)
        self._version = PolicyVersion(0, 0 if resume_from is None else resume_from.step)
        self._trainer_failures, self._failed_at = 0, 0
        """The trainer's failures, and the highest step before a failure. (Steps that are repeated are no progress.)"""
        self._starting: asyncio.Task[None] | None = None
        """The task that starts the actors; None at other times."""

    def stop(self, number: int) -> None:
        """End the run after the current optimizer step, and write the final weights. During the start, end at once.
        `number`: the number of the stop signal."""
        self.stopped_by = number
        if self._starting is not None:
            self._say("stopping before the first step ...")
            self._starting.cancel()
        elif self._has_all_steps:
            self._say(f"stopping: all {self._version.step} steps are done, the final weights are still written ...")
        else:
            self._say("stopping: the current step is finished, then the final weights are written ...")

    @property
    def _has_all_steps(self) -> bool:
        return self._version.step >= self._config.run.max_steps

    async def run(self) -> None:
        """Start the actors, train, and write the final weights and the summary. `RunFailed` if a part fails too often,
        or the run cannot make progress."""
        try:
            for name, actor in self._supervised.items():
                self._supervisor.watch(name, partial(life_of, actor))
            if not await self._started():
                end_early(self._folder, self._say, self._version.step)
                return
            generating = asyncio.ensure_future(self._generate())
            training = asyncio.ensure_future(self._through_losses(self._train))
            watching = asyncio.ensure_future(self._hosts.run())
            ended, _ = await asyncio.wait([training, generating, watching], return_when=asyncio.FIRST_COMPLETED)
            for first in ended:
                first.result()
            await training
            watching.cancel()
            self._scaling.stop()
            await self._finish()
            await generating
            await ask_buffer(self._buffer.stop)  # last, because the hub drops the gauges of a silent buffer
        except ray.exceptions.RayError as error:
            raise RunFailed(f"an actor failed: {in_a_line(error)} (full text: logs/driver.log)") from error
        finally:
            self._supervisor.stop()

    # -- start --------------------------------------------------------------------------------------------------------

    async def _started(self) -> bool:
        """Start the actors; False if the run was stopped before training."""
        starting = self._starting = asyncio.ensure_future(self._start())
        try:
            await starting
        except asyncio.CancelledError:
            if not self.stopped_by:
                raise
        return not starting.cancelled()

    async def _start(self) -> None:
        self._telemetry.start()
        self._telemetry.at(self._version)
        self._telemetry.state("starting")
        with phase("starting the actors", self._say):
            await ask_buffer(self._buffer.ready)
        if self._resume_from is not None:
            await self._checkpoints.resume(self._resume_from)
            # Not earlier: if the buffer refuses to resume, the run's settings and its recorded end must stay.
            self._folder.begin(resolved_yaml(self._config), self._config.metrics.wandb, self._prepared.model_folder)
        elif self._prepared.warmed_model is not None:
            await self._make_base(self._prepared.warmed_model)
        url = await self._all_up()
        await self._hosts.begin()
        await self._observer.write_targets()
        if self._config.metrics.port is None and not url.endswith(f":{DEFAULT_PORT}"):
            self._say(f"port {DEFAULT_PORT} is taken; this run has the next free one")
        self._say(f"status page: {url} (in a terminal: baton status {self._folder.path})")
        await self._through_losses(self._first_weights)
        self._starting = None  # from now on a stop signal ends the run after its current step
        self._progress.begin()
        self._telemetry.state("training")

    async def _all_up(self) -> str:
        """Let every actor load the model or start its server. Returns the address of the metrics hub."""
        made_base = self._prepared.warmed_model is not None and self._resume_from is None
        load = self._trainer.restart if made_base else self._trainer.load
        starting: dict[str, Callable[[], Awaitable[Any]]] = {
            "the metrics hub": partial(
                started, partial(call, self._hub.start, who="the metrics hub"), tries=self._config.run.max_restarts + 1
            ),
            "the trainer": partial(self._trainer_up, load),
            "the generators": self._generator_pool.start,
            **self._further,
        }
        waited_for = dict.fromkeys(starting)

        async def up(name: str) -> Any:
            try:
                return await starting[name]()  # made here: a cancelled start leaves no coroutine
            finally:
                del waited_for[name]

        with phase("loading the model: engines and trainer ranks start", self._say, lambda: ", ".join([*waited_for])):
            url, *_ = await asyncio.gather(*(up(name) for name in starting))
        return str(url)

    async def _trainer_up(self, load: Callable[[Path], Awaitable[None]]) -> None:
        """Let the ranks load the model. If ranks are lost, they restart while the engines go on starting."""
        starting: Awaitable[Any] = load(self._prepared.base)
        while True:
            try:
                await starting
                return
            except TrainerLost as lost:
                starting = self._restart_trainer(lost)

    async def _first_weights(self) -> None:
        """Publish the weights with which the run begins or continues, and evaluate them."""
        if not self._version.incarnation:  # else a restarted trainer has published them
            await self._set_up(self._resume_from)
        if self._resume_from is not None:
            self._say(f"resuming after step {self._resume_from.step}")
            return await self._evaluate(self._evaluations.continue_from(self._resume_from.step))
        if self._config.trainer.checkpoint_every:
            await self._checkpoints.begin(self._version.step)
        await self._evaluate(self._evaluations.is_due(0))

    async def _set_up(self, manifest: Manifest | None) -> None:
        """Let the loaded ranks continue from a checkpoint. Without a manifest: do the warm start, if it was not done
        before."""
        if manifest is not None and manifest.files:  # otherwise the ranks have loaded the state of step 0
            with phase(f"reading the checkpoint of step {manifest.step}", self._say):
                await self._trainer.restore(self._checkpoints.path(manifest.step))
        elif manifest is None and self._prepared.warmed_model is None:
            await self._warm_up()
        await self._continue_from(0 if manifest is None else manifest.step)

    async def _make_base(self, folder: Path) -> None:
        """Do the warm start of all weights, and write the model to which trainer and engines add the adapter."""
        load = self._trainer.load
        for restarts_left in reversed(range(self._config.run.max_restarts + 1)):
            try:
                with phase("loading the model: trainer ranks start", self._say):
                    await load(self._prepared.model_folder, adapter=False)
                await self._warm_up()
                return await self._trainer.export(folder)
            except TrainerLost as lost:
                if not restarts_left:
                    raise
                self._say(f"{lost}; the warm start begins anew")
                load = self._trainer.restart

    async def _warm_up(self) -> None:
        """Take the supervised steps of `model.warm_start`, if it is configured."""
        config = self._config
        if (settings := config.model.warm_start) is None:
            return
        self._telemetry.state("warm_start")
        self._telemetry.doing("warm_start")
        with phase(f"warm start: {settings.steps} supervised steps on demonstrations", self._say):
            folder = self._prepared.model_folder
            rows = demonstrations(config.model, config.env, config.generator, config.run.seed, folder)
            loss = await self._trainer.warm_start(rows)
        self._say(f"warm start: cross-entropy {loss:.3f} per token")

    async def _continue_from(self, step: int) -> None:
        """Join the buffer as a trainer at this step, and publish the weights to the engines."""
        incarnation = await ask_buffer(self._buffer.join, "trainer", "trainer", step)
        self._version = PolicyVersion(incarnation, step)
        self._telemetry.at(self._version)
        self._progress.go_on_from(step)
        self._evaluations.continue_from(step)
        self._checkpoints.go_on_from(step)
        await self._weights.publish(await self._trainer.weights(self._version))

    # -- training -----------------------------------------------------------------------------------------------------

    async def _generate(self) -> None:
        """Run the generators. If a generator fails for good while the run stops, the final weights are still
        written."""
        try:
            await self._generator_pool.run()
        except RunFailed as failed:
            if not self.stopped_by:
                raise
            self._say(str(failed))

    async def _through_losses(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do work that needs the trainer. Whenever the trainer is lost, restart it and repeat the work."""
        ranks, lost = [TRAINER, *self._trainer.named], None
        while True:
            try:
                if lost is not None:
                    manifest = await self._restart_trainer(lost)
                    await self._supervisor.unless_lost(ranks, self._set_up(manifest))
                return await self._supervisor.unless_lost(ranks, work())
            except (TrainerLost, ProcessLost) as error:
                lost = error

    async def _train(self) -> None:
        while not self._has_all_steps and not self.stopped_by:
            await self._step()
        await self._write_final()

    async def _step(self) -> None:
        """Take one optimizer step. If the step is not applied, its mini-batch is released and leased again."""
        with self._observer.step(self._version.step + 1):
            if (leased := await self._lease()) is None:
                return
            report = await self._trainer.step(leased.parts)
        if not report.applied:
            why = report.reason or "not applied"
            accepted(await ask_buffer(self._buffer.release, self._version.incarnation, leased.lease, why))
            return self._observer.not_applied(leased, self._version.step + 1, why)
        await self._commit(leased, report.metrics)
        await self._publish()
        await self._evaluate(self._evaluations.is_due(self._version.step))
        self._observer.doing("bookkeeping")
        measured = {**report.metrics, **self._evaluations.numbers(self._version.step)}
        await self._observer.stepped(self._version, leased, measured, await self._generator_pool.statuses())
        # Last, so that a run which resumes from this checkpoint has the step's line.
        self._observer.doing("checkpoint")
        await self._checkpoints.follow(self._version.step)

    async def _commit(self, leased: LeasedBatch, measured: Mapping[str, float]) -> None:
        self._observer.applied(self._version.step + 1, measured)
        self._version = PolicyVersion(self._version.incarnation, self._version.step + 1)
        accepted(await ask_buffer(self._buffer.commit, self._version.incarnation, leased.lease, self._version))
        self._generator_pool.progressed()

    async def _publish(self) -> None:
        if self._version.step % self._config.weights.sync_every == 0:
            self._observer.doing("weights")
            self._progress.synced(await self._weights.published())
            await self._weights.publish(await self._trainer.weights(self._version))

    async def _evaluate(self, is_due: bool) -> None:
        """Evaluate the weights if an evaluation is due."""
        if not is_due:
            return
        self._telemetry.doing("evaluating")
        self._progress.synced(await self._weights.published())
        await self._evaluations.at(self._version.step)
        best = self._config.run.keep_best
        if best is not None and self._folder.is_best(self._version.step, best):
            with phase("writing the best weights so far", self._say, after=QUIET_SECONDS):
                await self._trainer.export(self._folder.path / BEST)

    async def _lease(self) -> LeasedBatch | None:
        """Wait for the next mini-batch; None if the run was stopped meanwhile."""
        start = time.monotonic()
        self._observer.doing("waiting", "a mini-batch")
        while not self.stopped_by:
            answer = await ask_buffer(self._buffer.lease, self._version.incarnation, POLL_SECONDS)
            if self._config.scorers:
                self._observer.scorers_failed(*await ask_buffer(self._buffer.scorer_failures))
            if isinstance(answer, LeasedBatch):
                self._observer.leased(answer)
                return answer
            accepted(answer)
            # A checkpoint that is late frees the journal, which may be full.
            await self._checkpoints.follow(self._version.step)
            generators = await self._generator_pool.statuses()
            try:
                self._observer.waits(answer, time.monotonic() - start, generators)
            except RunFailed:
                self._folder.append_trajectories(await ask_buffer(self._buffer.lost))
                raise
            if answer.reason is WaitReason.FILTERED:
                raise RunFailed(f"{answer.detail}; nothing is left to learn from")
        return None

    async def _restart_trainer(self, error: BatonError) -> Manifest | None:
        """Restart all ranks. Returns the newest checkpoint, from which they continue; None if they begin again with the
        first weights. The buffer leases the groups again that were trained after the checkpoint."""
        # A step that is repeated is no progress, nor is one after which no checkpoint could be written.
        if (reached := self._checkpoints.reached(self._version.step)) > self._failed_at:
            self._trainer_failures, self._failed_at = 0, reached
        if not (isinstance(error, TrainerLost) and error.is_remedied):
            self._trainer_failures += 1
        if self._checkpoints.completes:  # notifying the buffer may take a while
            self._say(f"{error}; the last checkpoint is completed first")
        await self._checkpoints.abandon()
        manifest = self._checkpoints.newest()
        unwritten = f"; the final weights of step {self._version.step} are not written" if self.stopped_by else ""
        if manifest is None and self._version.step and not self._config.trainer.checkpoint_every:
            why = f"{error}; there is no checkpoint to restart from (trainer.checkpoint_every)"
            raise RunFailed(why + unwritten) from error
        if self._trainer_failures > self._config.run.max_restarts:
            times = f"the trainer failed {self._trainer_failures} times; the last time: {error}"
            raise RunFailed(times + unwritten) from error
        step = 0 if manifest is None else manifest.step
        self._say(f"{error}{unwritten if step < self._version.step else ''}; the trainer restarts from step {step}")
        left = partial(", ".join, [*self._trainer.named])
        with phase("restarting the trainer", self._say, left, after=QUIET_SECONDS, seconds=QUIET_SECONDS):
            await self._trainer.restart(self._prepared.base)
        return manifest

    # -- end ----------------------------------------------------------------------------------------------------------

    async def _write_final(self) -> None:
        """Write the final weights, and a checkpoint from which the run can be resumed."""
        self._telemetry.state("stopping")
        self._telemetry.doing("stopping")
        with phase("writing the final weights", self._say):
            await self._trainer.export(self._folder.path / FINAL)
        self._folder.has_final = True
        if self._config.trainer.checkpoint_every:
            with phase("writing the last checkpoint", self._say, after=QUIET_SECONDS):
                await self._checkpoints.begin(self._version.step)
                await self._checkpoints.settle()
        else:
            await ask_buffer(self._buffer.covered, self._version.step, self._version.step)

    async def _finish(self) -> None:
        """Stop the generators. A stopped run keeps its open groups, so that it can be resumed."""
        state, agents = "finished" if self._has_all_steps else "stopped", self._config.endpoint
        if state == "finished":
            if agents is not None and agents.end_grace:
                await self._generator_pool.drain(agents.end_grace, lambda: bool(self.stopped_by))
            self._folder.append_trajectories(await ask_buffer(self._buffer.end))
        generators = await self._generator_pool.statuses()
        await self._generator_pool.stop(resumable=state == "stopped")
        self._telemetry.state(state)
        self._telemetry.stop()
        await self._observer.ended(state, await ask_buffer(self._buffer.status), generators)
