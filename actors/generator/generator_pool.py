"""Starts the generators of a run, restarts them when they fail, and sends them new weights while they generate.

The first generators have a part of the run's placement group and are restarted in it. A generator that joins later
has a separate placement group, and is removed together with that placement group when it fails.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.calls import ACTOR_FAILED, CALL_SECONDS, RESTARTING, call, in_a_line, log_failure, started
from actors.deaths import kernel_kills, life_of
from actors.observe.telemetry import RunTelemetry
from actors.weights.delivery import Delivery
from actors.weights.part import TRAINER
from service.backoff import retried
from service.config import RunConfig, WeightsConfig
from service.config.rollout import GeneratorConfig
from service.errors import BatonError, ProcessLost, RunFailed, Starved, UserError
from service.handoff.attempts import RUN_END
from service.run.liveness.host_memory import advice
from service.run.liveness.supervisor import Supervisor
from service.run.phases import phase
from service.types import PolicyVersion

STOP_SECONDS = 10.0
"""Seconds that a generator may take to stop before its process is ended."""
HAND_OVER_SECONDS = 30.0
"""Seconds, after its grace, within which a generator that leaves must have handed over its open trajectories."""
LOOK_SECONDS = 0.2
"""Seconds between two checks whether the generators have ended."""
STATUS_SECONDS = 5.0
"""Seconds after which a generator that does not answer is omitted from a report."""
BLOCKED = " (an environment that blocks its process needs env.isolation: process)"
"""Text that is added to a message about a generator that does not answer: the usual reason."""


class GeneratorPool:
    """All generators of a run; each fails and restarts independently of the others."""

    def __init__(
        self,
        settings: GeneratorConfig,
        run: RunConfig,
        weights: WeightsConfig,
        generators: Sequence[Any],
        trainer: Any,
        telemetry: RunTelemetry,
        say: Callable[[str], None],
        supervisor: Supervisor,
        buffer: Any = None,
    ) -> None:
        self._settings, self._run, self._buffer = settings, run, buffer
        self._telemetry, self._say, self._supervisor = telemetry, say, supervisor
        self._generators = {f"generator-{number}": generator for number, generator in enumerate(generators)}
        self._failures: Counter[str] = Counter()
        self._down: set[str] = set()
        """Names of the generators that restart or stop; they are not called for weights or evaluations."""
        failed = partial(supervisor.report, TRAINER)
        sent = partial(telemetry.metrics.count, "baton_weight_sent_bytes_total")
        self.weights = Delivery(weights, self._generators, trainer, self._is_up, self._not_taken, failed, sent)
        self._stopping = False
        self._rooms: dict[str, PlacementGroup] = {}
        """The placement group of each generator that joined later."""
        self._leaving: set[str] = set()
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._ended: asyncio.Queue[str | None] = asyncio.Queue()
        """Names of generators whose tasks have ended. None: the run ends (also if there is no generator)."""
        self._drained = False
        self.evaluating: set[str] = set()
        """Names of the generators that evaluate. Such a generator leaves only if its node ends."""

    async def start(self) -> None:
        """Start every engine. An engine that fails is started again.

        Raises:
            UserError: an engine cannot start with these settings.
            RunFailed: an engine failed more than `run.max_restarts` times.
        """
        await asyncio.gather(*(self._first_start(name) for name in self._generators))

    async def _first_start(self, name: str) -> None:
        if isinstance(failed := await self._came_up(name), UserError | Starved):
            raise failed
        if failed is not None:
            await self._start_again(name, failed)

    async def _start(self, name: str, generator: Any) -> None:
        self._supervisor.watch(name, partial(life_of, generator), self._settings.silent_deadline, BLOCKED)
        within = self._run.start_deadline + CALL_SECONDS
        self.weights.register(name, str(await call(generator.start, who=name, within=within)))

    async def run(self) -> None:
        """Let all generators generate until the buffer is drained. A generator that fails is restarted; if it has a
        separate placement group, the generator and the placement group are removed instead.

        Raises:
            RunFailed: a generator failed more than `run.max_restarts` times without an optimizer step in between.
        """
        for name in self._generators:
            self._begin(name)
        try:
            while not self._stopping and (self._keepers or not self._drained):
                if (ended := await self._ended.get()) is not None:
                    await self._keepers.pop(ended)
        finally:
            for keeper in self._keepers.values():
                keeper.cancel()

    def _begin(self, name: str) -> None:
        keeper = self._keepers[name] = asyncio.ensure_future(self._keep(name))
        keeper.add_done_callback(lambda done: self._ended.put_nowait(name))

    async def _keep(self, name: str) -> None:
        while not self._ends(name):
            naming = asyncio.ensure_future(self._name_what_blocks(name))
            log_failure(naming, f"what blocks {name} is not named any more")
            try:
                running = call(self._generators[name].run, who=name, within=None)
                await self._supervisor.unless_lost([name], running)
                self._drained |= name not in self._leaving
                return
            except ACTOR_FAILED as error:
                if self._ends(name):
                    return
                if name in self._rooms:
                    return await self._let_go(name, error)
                await self._start_again(name, error)
            finally:
                naming.cancel()

    async def _name_what_blocks(self, name: str) -> None:
        for known in itertools.count():
            ask = partial(call, self._generators[name].blocked, known, who=name, within=None)
            self._say(f"{name}: {await retried(ask, ACTOR_FAILED, RESTARTING)}")

    def _ends(self, name: str) -> bool:
        return self._stopping or name in self._leaving

    # -- joining and leaving ------------------------------------------------------------------------------------------

    def nodes(self) -> dict[str, str]:
        """Return the node of each generator that generates and does not leave, by the generator's name, in the order of
        the generators' numbers."""
        staying = sorted(self._keepers.keys() - self._leaving, key=lambda name: int(name.rpartition("-")[2]))
        return {name: self.weights.node_of[name] for name in staying}

    def free_number(self) -> int:
        """Return the lowest number that no generator has."""
        return next(n for n in range(len(self._generators) + 1) if f"generator-{n}" not in self._generators)

    async def join(self, name: str, generator: Any, room: PlacementGroup) -> None:
        """Start a generator in its own placement group, send it the newest weights, and let it generate."""
        try:
            await self._start(name, generator)
        except BaseException:  # also if cancelled, because fewer are needed
            self._supervisor.forget(name)
            _give_back(generator, room)
            raise
        loaded = time.monotonic()
        self._generators[name], self._rooms[name] = generator, room
        self._leaving.discard(name)  # an earlier generator of that name had left
        await self.weights.update(name)
        self._begin(name)
        self._say(f"{name} has joined, {time.monotonic() - loaded:.1f} s after its engine had loaded")
        self._share()

    async def leave(self, name: str, grace: float) -> None:
        """Let a generator continue for `grace` seconds, hand over its open trajectories, and end."""
        self._leaving.add(name)
        self._share()
        generator = self._generators[name]
        with suppress(*ACTOR_FAILED):  # else the buffer assigns its groups again, below
            await call(generator.leave, grace, who=name, within=grace + HAND_OVER_SECONDS)
            self._down.add(name)
            await call(generator.stop, who=name, within=STOP_SECONDS)
        await self._forget(name)
        self._say(f"{name} has left")

    async def _let_go(self, name: str, error: BaseException) -> None:
        self._leaving.add(name)
        self._count_failure(name, error)
        self._say(f"{name} failed ({in_a_line(error)}); it is let go")
        await self._forget(name)
        self._share()

    async def _forget(self, name: str) -> None:
        self._supervisor.forget(name)
        _give_back(self._generators[name], self._rooms.pop(name, None))
        await self.weights.forget(name)
        del self._generators[name]
        self._down.discard(name)
        await call(self._buffer.leave, name, None, "gone", who="the buffer")
        self._telemetry.left(name)

    def _share(self) -> None:
        staying = self.nodes()
        self._telemetry.generators(max(len(staying), self._settings.min_engines))
        for name in staying:
            self._generators[name].share.remote(-(-self._settings.concurrent_groups // len(staying)))

    # -- failures -----------------------------------------------------------------------------------------------------

    async def _start_again(self, name: str, error: BaseException) -> None:
        failed: BaseException | None = error
        while failed is not None and not self._ends(name):
            self._down.add(name)
            self._count_failure(name, failed)
            why = in_a_line(failed)
            memory = "" if isinstance(failed, ProcessLost) else advice(why, name) or kernel_kills.clause(name)
            self._say(f"{name} failed ({why}{memory}); it starts again")
            if isinstance(failed, RunFailed | Starved):  # the supervisor counts other losses of processes
                self._supervisor.restarts[name] += 1
            ray.kill(self._generators[name], no_restart=False)
            # The first generator that is up takes over its groups, usually before its engine has loaded again.
            await call(self._buffer.leave, name, None, "failed", who="the buffer")
            failed = await self._came_up(name)
        if not self._ends(name):
            self._say(f"{name} is back")

    def _count_failure(self, name: str, error: BaseException) -> None:
        self._failures[name] += 1
        if (times := self._failures[name]) > self._run.max_restarts or isinstance(error, UserError):
            raise RunFailed(f"{name} failed {times} times; the last time: {in_a_line(error)}") from error

    async def _came_up(self, name: str) -> BaseException | None:

        async def start() -> None:
            if not self._ends(name):
                await self._start(name, self._generators[name])

        try:
            await started(start, self._run.start_deadline)
        except BatonError as failed:
            return failed
        except ray.exceptions.RayActorError as down:
            raise RunFailed(f"{name} did not come back: {in_a_line(down)}") from down
        self._down.discard(name)
        return await self.weights.update(name)

    def progressed(self) -> None:
        """Note that an optimizer step was taken, and set each generator's number of failures to 0."""
        self._failures.clear()

    def _not_taken(self, name: str, version: PolicyVersion, error: BaseException) -> None:
        if name in self._leaving:
            return  # it needs no weights any more
        self._telemetry.metrics.count("baton_weight_sync_failures_total")
        self._say(f"{name} did not take the weights of version {version}: {in_a_line(error)}")
        self._supervisor.report(name, error)  # with its old weights, tokens may become too stale to train

    # -- all of them --------------------------------------------------------------------------------------------------

    def _is_up(self, name: str) -> bool:
        return name in self._generators and name not in self._down

    def up(self) -> dict[str, Any]:
        """Return the generators that are up and do not leave."""
        return {name: one for name, one in self._generators.items() if name not in self._down | self._leaving}

    async def statuses(self) -> list[dict[str, Any]]:
        """Return the status of each generator that answers."""
        answers = await asyncio.gather(*(self._status(g) for g in self._generators.values()))
        return [answer for answer in answers if answer is not None]

    async def _status(self, generator: Any) -> dict[str, Any] | None:
        try:
            return dict(await call(generator.status, who="a generator", within=STATUS_SECONDS))
        except (ray.exceptions.RayActorError, Starved):
            return None

    async def drain(self, grace: float, is_stopped: Callable[[], bool]) -> None:
        """Let agents end their open sessions, for up to `grace` seconds or until `is_stopped`. No new session
        begins."""
        await call(self._buffer.drain, RUN_END, who="the buffer")
        deadline = time.monotonic() + grace
        with phase(f"open sessions have {grace:g} s to end (agents.end_grace)", self._say):
            # a task that failed stays in the table
            while any(not keeper.done() for keeper in self._keepers.values()) and time.monotonic() < deadline:
                if is_stopped():
                    break
                await asyncio.sleep(LOOK_SECONDS)

    async def stop(self, resumable: bool) -> None:
        """End the open trajectories and the engines. Weights that are still being sent are discarded. In a `resumable`
        run, programs that agents started elsewhere continue."""
        self._stopping = True
        self._ended.put_nowait(None)
        self.weights.give_up()
        stops = (call(generator.stop, resumable, who="a generator") for generator in self._generators.values())
        await asyncio.wait([asyncio.gather(*stops, return_exceptions=True)], timeout=STOP_SECONDS)


def _give_back(generator: Any, room: PlacementGroup | None) -> None:
    ray.kill(generator)
    if room is not None:
        remove_placement_group(room)
