"""The generators of a run: started, restarted when they fail, and given new weights while they generate."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from actors.calls import CALL_SECONDS, call, in_a_line, may_be_dropped
from actors.evaluation.evaluator import evaluate_on
from actors.generator.broadcasts import Broadcasts
from actors.observe.telemetry import RunTelemetry
from actors.trainer.group import TrainerGroup, TrainerLost
from actors.weights.checksum import PublishedWeights
from actors.weights.node_files import NodeFiles
from service.config import Config
from service.errors import BatonError, RunFailed, Starved, UserError, WeightsGone
from service.evaluation.scores import Evaluation
from service.types import PolicyVersion

STOP_SECONDS = 10.0
"""Seconds that a generator may take to stop before its process is ended."""
RETRY_SECONDS = 0.5
"""Pause before the start of a restarting generator is tried again."""
STATUS_SECONDS = 5.0
"""Seconds after which a generator that does not answer is left out of a report."""
CHECK_SECONDS = 5.0
"""Seconds between two health checks of a generator."""
BLOCKED = "an environment that blocks its process needs env.isolation: process"
"""The usual reason for a generator that does not answer."""
GENERATOR_FAILED = (ray.exceptions.RayActorError, BatonError)
"""Errors of a call to a generator whose process, engine or node died; any other error is a bug."""


class GeneratorPool:
    """The generators of a run behind one object; each fails and restarts independently of the others."""

    def __init__(
        self,
        config: Config,
        generators: Sequence[Any],
        trainer: TrainerGroup,
        telemetry: RunTelemetry,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._generators = {f"generator-{number}": generator for number, generator in enumerate(generators)}
        self._telemetry = telemetry
        self._say = say
        self._failures: Counter[str] = Counter()
        self._down: set[str] = set()
        """Names of the generators that restart; they are not called for weights or evaluations."""
        self._latest: tuple[PolicyVersion, PublishedWeights] | None = None
        """The newest weights that were sent to the engines."""
        self._sync: asyncio.Task[float] | None = None
        self._locks = {name: asyncio.Lock() for name in self._generators}
        self._files = NodeFiles(self._generators, config.weights.sync_deadline)
        self._broadcasts = Broadcasts(config, self._generators, trainer)
        self._broadcasting = asyncio.Lock()
        self._stopping = False

    async def start(self) -> None:
        """Start every engine."""
        await asyncio.gather(*(self._start(name) for name in self._generators))

    async def _start(self, name: str) -> None:
        # Longer than the engine's own deadline, whose error says more.
        within = self._config.generator.start_deadline + CALL_SECONDS
        self._files.register(name, await call(self._generators[name].start, who=name, within=within))

    async def run(self) -> None:
        """Generate until the buffer is drained; a generator that fails is restarted.

        Raises:
            RunFailed: a generator failed more than `run.max_restarts` times without an optimizer step in between.
        """
        await asyncio.gather(*(self._keep(name) for name in self._generators))

    async def _keep(self, name: str) -> None:
        while not self._stopping:
            try:
                return await self._watched(name)
            except GENERATOR_FAILED as error:
                if not self._stopping:
                    await self._start_again(name, error)

    async def _watched(self, name: str) -> None:
        """Wait until a generator ends; one that does not answer within `generator.silent_deadline` counts as failed."""
        generator = self._generators[name]
        running = asyncio.ensure_future(call(generator.run, who=name, within=None))
        may_be_dropped(running)  # where the status fails at the same time
        try:
            while True:
                await asyncio.wait([running], timeout=CHECK_SECONDS)
                if running.done():
                    running.result()
                    return
                await call(generator.status, who=f"{name} ({BLOCKED})", within=self._config.generator.silent_deadline)
        finally:
            running.cancel()

    async def _start_again(self, name: str, error: BaseException) -> None:
        """Restart a failed generator in a new process, again where the restart fails, and send the newest weights."""
        self._down.add(name)
        self._broadcasts.forget(name)
        failed: BaseException | None = error
        while failed is not None:
            self._failures[name] += 1
            times = self._failures[name]
            if times > self._config.run.max_restarts or isinstance(failed, UserError):
                raise RunFailed(f"{name} failed {times} times; the last time: {in_a_line(failed)}") from failed
            self._say(f"{name} failed ({in_a_line(failed)}); it starts again")
            ray.kill(self._generators[name], no_restart=False)
            failed = await self._came_up(name)
        if self._stopping:
            return
        self._down.discard(name)
        await self._update(name)
        self._say(f"{name} is back")

    async def _came_up(self, name: str) -> BatonError | None:
        """Wait for a generator's new process and engine, unless the run ends; returns why the engine did not start."""
        deadline = time.monotonic() + self._config.generator.start_deadline
        while not self._stopping:
            try:
                await self._start(name)
                return None
            except BatonError as failed:
                return failed
            except ray.exceptions.RayActorError as down:
                if time.monotonic() > deadline:
                    raise RunFailed(f"{name} did not come back: {in_a_line(down)}") from down
                await asyncio.sleep(RETRY_SECONDS)
        return None

    def progressed(self) -> None:
        """Reset the count of failures: an optimizer step was taken."""
        self._failures.clear()

    async def publish(self, version: PolicyVersion, weights: PublishedWeights) -> None:
        """Wait until the previous weights have arrived, then send these to every engine in the background."""
        await self.published()
        self._latest = version, weights
        self._sync = asyncio.ensure_future(self._update_all())

    async def published(self) -> float | None:
        """Wait until every engine serves the newest weights; returns the seconds from sending to serving.

        Raises:
            RunFailed: it took longer than `weights.sync_deadline`.
        """
        if self._sync is None:
            return None
        deadline = self._config.weights.sync_deadline
        try:
            async with asyncio.timeout(deadline):
                seconds = await self._sync
        except TimeoutError as error:
            raise RunFailed(f"the engines did not take new weights within {deadline:.0f} s") from error
        self._sync = None
        return seconds

    async def _update_all(self) -> float:
        start = time.monotonic()
        if self._config.weights.transport == "nccl":
            await self._broadcast(list(self._generators))
        else:
            await asyncio.gather(*(self._update(name) for name in self._generators))
        return time.monotonic() - start

    async def _update(self, name: str) -> None:
        """Update one engine; an engine that is down, or fails during the update, is updated after its restart."""
        if self._config.weights.transport == "nccl":
            return await self._broadcast([name])
        async with self._locks[name]:
            if self._latest is None or name in self._down:
                return
            version, weights = self._latest
            try:
                if self._config.weights.transport == "memory":
                    await self._take_file(name, version, weights)
                else:
                    # A rank shares only the newest weights; older ones are skipped, because newer ones are about to
                    # be published.
                    handles = await self._trainer.ipc_handles(list(self._generators).index(name), version)
                    if handles is not None:
                        await self._take(name, version, handles.data, handles.checksum)
            except (*GENERATOR_FAILED, ray.exceptions.ObjectLostError) as error:
                # Lost weights were on the trainer's node; the trainer restarts and publishes newer ones.
                self._not_taken(name, version, error)

    async def _broadcast(self, names: list[str]) -> None:
        """Update those of these engines that are up by one broadcast."""
        async with self._broadcasting:
            up = [name for name in names if name not in self._down]
            if self._latest is None or not up:
                return
            version, weights = self._latest
            try:
                lost = await self._broadcasts.send(up, version, weights)
            except TrainerLost as trainer_lost:  # it restarts and publishes newer ones
                lost = dict.fromkeys(up, trainer_lost)
            for name, error in lost.items():
                self._not_taken(name, version, error)

    def _not_taken(self, name: str, version: PolicyVersion, error: BaseException) -> None:
        self._telemetry.sync_failed()
        self._say(f"{name} did not take the weights of version {version}: {in_a_line(error)}")

    async def _take_file(self, name: str, version: PolicyVersion, weights: PublishedWeights) -> None:
        """Let an engine load the weights file of its node; if the file is gone with its holder, try a new file."""
        for tries_left in reversed(range(len(self._generators))):
            async with self._files.path_for(name, weights) as path:
                try:
                    return await self._take(name, version, path, weights.checksum)
                except WeightsGone:
                    self._files.forget(name)
                    if not tries_left:
                        raise

    async def _take(self, name: str, version: PolicyVersion, data: Any, checksum: int) -> None:
        update = self._generators[name].update_weights
        await call(update, version.pack(), data, checksum, who=name, within=self._config.weights.sync_deadline)

    def trainer_lost(self) -> None:
        """Cut off a broadcast that is under way: the trainer's processes are gone."""
        self._broadcasts.cut_off("the trainer restarts")

    async def evaluate(self, name: str, tasks_file: Path, n_samples: int, most: int | None = None) -> Evaluation | None:
        """Evaluate a set, or a sample of `most` prompts, on the served weights; None where the evaluation failed.

        No trajectory is submitted to the buffer.
        """
        up = [generator for other, generator in self._generators.items() if other not in self._down]
        if not up:
            self._say(f"the evaluation of {name} was given up: no generator is up")
            return None
        deadline = self._config.data.eval_deadline
        try:
            async with asyncio.timeout(deadline):
                return await evaluate_on(up, name, tasks_file, n_samples, most)
        except TimeoutError:
            self._say(f"the evaluation of {name} was given up after {deadline:.0f} s")
        except GENERATOR_FAILED as error:
            self._say(f"the evaluation of {name} was given up: {in_a_line(error)}")
        return None

    async def statuses(self) -> list[dict[str, Any]]:
        """The status of each generator that answers."""
        answers = await asyncio.gather(*(self._status(g) for g in self._generators.values()))
        return [answer for answer in answers if answer is not None]

    async def _status(self, generator: Any) -> dict[str, Any] | None:
        try:
            status: dict[str, Any] = await call(generator.status, who="a generator", within=STATUS_SECONDS)
        except (ray.exceptions.RayActorError, Starved):
            return None
        return status

    async def stop(self) -> None:
        """End the open trajectories and the engines; weights on their way are given up, which nobody needs any more."""
        self._stopping = True
        if self._sync is not None:
            may_be_dropped(self._sync)
            self._sync.cancel()
        stops = (call(generator.stop, who="a generator") for generator in self._generators.values())
        await asyncio.wait([asyncio.gather(*stops, return_exceptions=True)], timeout=STOP_SECONDS)
