"""The driver's loop: lease -> step -> commit -> publish, while the generators go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import ray.exceptions

from actors.buffer import Leased
from actors.cluster import Cluster
from actors.telemetry import RunTelemetry
from service.config import Config
from service.errors import BatonError, RunFailed
from service.handoff.verbs import Wait
from service.prepare import Prepared, demonstrations
from service.progress import Progress
from service.runfolder import RunFolder
from service.types import PolicyVersion, Refusal

POLL_SECONDS = 2.0
"""Length of one long poll for a mini-batch; between two of them the driver looks whether it was stopped."""
STOP_SECONDS = 10.0
"""Seconds that a generator may take to stop before its process is ended."""


class Coordinator:
    """Drives one run; `stop` ends it in order."""

    def __init__(
        self, config: Config, cluster: Cluster, folder: RunFolder, prepared: Prepared, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._folder = folder
        self._prepared = prepared
        self._say = say
        self._progress = Progress(config, folder, say)
        self._telemetry = RunTelemetry(config, cluster.hub, str(folder.path))
        self._trainer_epoch = 0
        self._version = PolicyVersion(0, 0)
        self._sync: asyncio.Task[float] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopping = False
        self.stopped_by: int | None = None

    def stop(self, number: int) -> None:
        """End the run after the step at hand and write the final weights; a run that still starts ends at once."""
        self.stopped_by = number
        self._stopping = True
        if self._starting is not None:
            self._say("stopping before the first step ...")
            self._starting.cancel()
        else:
            self._say("stopping: the step at hand ends, then the final weights are written ...")

    async def run(self) -> None:
        """Start everything, train, write the final weights and the summary.

        Raises:
            RunFailed: an actor died, or the run cannot make progress.
        """
        try:
            if not await self._started():
                return
            generators = [asyncio.ensure_future(_call(g.run)) for g in self._cluster.generators]
            training = asyncio.ensure_future(self._train())
            await asyncio.wait([training, *generators], return_when=asyncio.FIRST_COMPLETED)
            if not training.done():
                for generator in generators:
                    if generator.done():
                        generator.result()
            await training
            await self._finish()
        except ray.exceptions.RayError as error:
            log = self._folder.path / "logs" / "failure.txt"
            log.write_text(str(error))
            raise RunFailed(f"an actor failed: {_last_line(error)} (all of it: {log})") from error

    async def _started(self) -> bool:
        """Start everything; False when the run was stopped meanwhile."""
        self._starting = asyncio.ensure_future(self._start())
        try:
            await self._starting
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        self._starting = None
        return not self._stopping

    async def _start(self) -> None:
        self._telemetry.start()
        self._telemetry.state("starting")
        self._say("loading the model: engines and trainer ranks start ...")
        trainer = self._cluster.trainer
        url, *_ = await asyncio.gather(
            _call(self._cluster.hub.start),
            trainer.load(self._prepared.model_folder),
            *(_call(generator.start) for generator in self._cluster.generators),
        )
        self._folder.write_address(url)
        self._say(f"metrics and status: {url}/metrics, {url}/status")
        self._trainer_epoch = await _call(self._cluster.buffer.join, "trainer", "trainer", 0)
        self._version = PolicyVersion(self._trainer_epoch, 0)
        await self._warm_start()
        self._progress.begin()
        self._telemetry.state("training")

    async def _warm_start(self) -> None:
        """Supervised steps, then the success they left, measured by the engines that will generate."""
        settings = self._config.model.warm_start
        if settings is not None:
            self._telemetry.state("warm_start")
            self._say(f"warm start: {settings.steps} supervised steps on demonstrations of mixed habits ...")
            loss = await self._cluster.trainer.warm_start(demonstrations(self._config, self._prepared.model_folder))
            self._say(f"warm start: cross-entropy {loss:.3f} per token")
        await self._publish()
        await self._published()
        if settings is not None and settings.probe_prompts:
            rows = list(range(min(settings.probe_prompts, len(self._prepared.tasks))))
            n = self._config.algorithm.n_samples_per_prompt
            rewards = await _call(self._cluster.generators[0].evaluate, rows, n)
            self._progress.probed(sum(rewards) / len(rewards), settings.expected_success)

    async def _train(self) -> None:
        """One turn of the loop is one optimizer step; what is not applied is released and leased again."""
        bad_steps = 0
        while self._version.step < self._config.run.max_steps and not self._stopping:
            leased = await self._lease()
            if leased is None:
                return
            report = await self._cluster.trainer.step(leased.parts)
            if not report.applied:
                bad_steps += 1
                await self._release(leased, report.reason or "not applied", bad_steps)
                continue
            bad_steps = 0
            self._version = PolicyVersion(self._trainer_epoch, self._version.step + 1)
            _accepted(await _call(self._cluster.buffer.commit, self._trainer_epoch, leased.lease, self._version))
            if self._version.step % self._config.weights.sync_every == 0:
                await self._publish()
            line = self._progress.stepped(self._version, leased.facts, report.metrics, await self._statuses())
            self._telemetry.stepped(self._version, line)

    async def _lease(self) -> Leased | None:
        """Wait for the next mini-batch; None when the run was stopped meanwhile."""
        start = time.monotonic()
        while not self._stopping:
            answer = await _call(self._cluster.buffer.lease, self._trainer_epoch, POLL_SECONDS)
            if isinstance(answer, Leased):
                self._progress.waited(time.monotonic() - start)
                return answer
            _accepted(answer)
            await self._look_after_sync()
            if time.monotonic() - start > self._config.run.stall_deadline:
                raise RunFailed(f"no mini-batch for {self._config.run.stall_deadline:.0f} s: {answer.detail}")
        return None

    async def _release(self, leased: Leased, reason: str, bad_steps: int) -> None:
        self._telemetry.aborted()
        self._say(f"step {self._version.step + 1} was not applied: {reason}")
        _accepted(await _call(self._cluster.buffer.release, self._trainer_epoch, leased.lease, reason))
        if bad_steps >= self._config.trainer.max_bad_steps:
            raise RunFailed(f"{bad_steps} optimizer steps in a row were not applied; the last one: {reason}")

    async def _publish(self) -> None:
        """Gather the weights and send them to every engine in the background; one update is under way at a time."""
        await self._published()
        weights = await self._cluster.trainer.weights()
        updates = [
            _call(generator.update_weights, self._version.pack(), weights.data, weights.checksum)
            for generator in self._cluster.generators
        ]
        self._sync = asyncio.ensure_future(_timed(asyncio.gather(*updates)))

    async def _published(self) -> None:
        """Wait until every engine serves the weights that were sent last."""
        if self._sync is not None:
            async with asyncio.timeout(self._config.weights.sync_deadline):
                self._progress.synced(await self._sync)
            self._sync = None

    async def _look_after_sync(self) -> None:
        """A failed update of an engine ends the run instead of starving it."""
        if self._sync is not None and self._sync.done():
            await self._published()

    async def _statuses(self) -> dict[str, Any]:
        buffer, *generators = await asyncio.gather(
            _call(self._cluster.buffer.status), *(_call(g.status) for g in self._cluster.generators)
        )
        return {"buffer": buffer, "generators": generators}

    async def _finish(self) -> None:
        """Issue no more work, write the final weights, then let the generators go."""
        self._telemetry.state("stopping")
        await _call(self._cluster.buffer.drain, "run_end")
        await self._cluster.trainer.export(self._folder.path / "final")
        await _call(self._cluster.buffer.covered, self._version.step)
        await _call(self._cluster.buffer.end)
        statuses = await self._statuses()
        await asyncio.wait(
            [asyncio.ensure_future(_call(generator.stop)) for generator in self._cluster.generators],
            timeout=STOP_SECONDS,
        )
        state = "stopped" if self._stopping else "finished"
        self._telemetry.stop(state)
        self._progress.end(state, statuses)


async def _call(method: Any, *arguments: Any) -> Any:
    """Call an actor's method and wait for the answer; an error that Baton raised there is raised here as itself."""
    try:
        return await method.remote(*arguments)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, BatonError):
            raise error.cause from None
        raise


def _last_line(error: ray.exceptions.RayError) -> str:
    """What went wrong, without the way there."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}".strip().splitlines()[0]
    return str(error).strip().splitlines()[-1].strip()


async def _timed(work: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> float:
    start = time.monotonic()
    await work
    return time.monotonic() - start


def _accepted(answer: object) -> None:
    """The buffer refuses a trainer only when another one took its place."""
    if isinstance(answer, Refusal):
        raise RunFailed(f"the buffer refused this trainer: {answer}")
    if not isinstance(answer, Wait | None):
        raise TypeError(f"unexpected answer of the buffer: {answer!r}")
