"""A generator: one engine, and the loops that play trajectories on it.

    claim a group -> play its samples concurrently -> put every finished step into the outbox -> claim the next

Weights change while trajectories run; each token carries the version that sampled it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ray
import ray.exceptions

from actors.calls import first_error, log_failure, resolve_actor
from actors.deaths import WATCHING, Supervised
from actors.engine.run_player import RunPlayer
from actors.engine.vllm_engine import VllmEngine
from actors.generator.activity import Activity
from actors.generator.claimer import Claimer
from actors.generator.gateway import GatewayAddress
from actors.generator.group_limit import GroupLimit
from actors.generator.outbox import Outbox, Unreachable
from actors.observe.actor_logs import keep_log
from actors.observe.reporting import Reporter
from actors.weights.image import ImageHolder
from actors.weights.part import Source
from actors.weights.policy_tensors import WeightBytes
from service.config import Config
from service.errors import ProcessLost, RunFailed, Starved
from service.evaluation.play import play_shard
from service.evaluation.scores import EvalShard, EvalTrajectory
from service.handoff.steps.tables import steps_table
from service.handoff.steps.values import StopReason
from service.handoff.steps.wire import accepted_group
from service.handoff.verbs import LEAVES, Assignment
from service.observe.loop_watch import LoopWatch
from service.observe.measure import measure_states, measure_steps
from service.observe.metrics import Metrics
from service.rollout.environment import Task
from service.rollout.player import AgentPlayer
from service.rollout.prompts.dataset import load_tasks, task_of
from service.rollout.run_secret import RunSecret
from service.types import EvaluationId, PolicyVersion, Steps, TrajectoryEnd, TrajectoryId
from service.user_code import enter_user_folder

log = logging.getLogger(__name__)
Done = TypeVar("Done")

CHECK_SECONDS = 1.0
"""Seconds between two health checks of the engine."""
RENEWALS = 4
"""Number of times within `buffer.step_deadline` that the deadlines of open sessions are renewed at the buffer."""
TELL_SECONDS = 10.0
"""Seconds within which the buffer must answer a renewal; then the renewal counts as lost."""
EXIT_SECONDS = 1.0
"""Seconds from a failure to the end of this process. In this time the error reaches the callers."""


class Membership(NamedTuple):
    """The claimer and the outbox of a generator's current incarnation."""

    claimer: Claimer
    outbox: Outbox


class Generator(ImageHolder, Supervised):
    """Plays trajectories for one buffer until the buffer is drained. This is a plain class, which the caller wraps as a
    Ray actor."""

    def __init__(
        self,
        name: str,
        config_json: str,
        model_folder: str,
        tasks_file: str,
        buffer: Any,
        hub: Any,
        secret: RunSecret | None = None,
        number: int = 0,
        base: str | None = None,
        gateway: GatewayAddress | None = None,
    ) -> None:
        """Store the settings. `secret`: the run's secret, for the keys of agents; `number`: the index of this generator
        in the run, from 0; `base`: the folder of the engine's weights, which exists when the engine starts (None:
        `model_folder`); `gateway`: the address of all agents of the run."""
        super().__init__()
        keep_log(name)
        self._name = name
        enter_user_folder()
        self._config = Config.model_validate_json(config_json)
        self._buffer = resolve_actor(buffer)
        self._tasks = load_tasks(Path(tasks_file))
        self._engine = VllmEngine(self._config, Path(base or model_folder), number)
        self._gateway = gateway
        route = gateway.route() if gateway is not None else None
        self._player = RunPlayer(self._config, Path(model_folder), self._engine, secret, number, route)
        self._limit = GroupLimit.of(self._config)
        self._groups = 0
        """Number of open groups."""
        self._playing: dict[TrajectoryId, asyncio.Task[None]] = {}
        self._room = asyncio.Event()
        self._joined: Membership | None = None
        self._watch: LoopWatch | None = None
        self._main: asyncio.Task[None] | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._stopping = False
        self._counts: Counter[str] = Counter()
        """Number of trajectories by stop reason."""
        self._unmeasured: list[Steps] = []
        """Steps that were sent and are not counted in the metrics yet."""
        self._reporter = Reporter("generator", name, self._config, resolve_actor(hub), self._measure_now)
        self._metrics = self._reporter.metrics
        self._activity = Activity(self._reporter.trace, self._engine.times)

    async def start(self) -> str:
        """Start the engine and join the buffer; returns the id of the node that this process runs on."""
        try:
            await self._engine.start(PolicyVersion(0, 0))
        except Starved as error:
            raise self._failed(Starved(f"{self._name}: {error}")) from error
        self._player.load()
        self._joined = await self._join()
        self._reporter.start()
        self._watch = LoopWatch()
        gateway, agents = self._gateway, self._player.agents
        if gateway is not None and agents is not None and gateway.route().url:
            await agents.listen()
            self._announcing = asyncio.ensure_future(gateway.announce(self._name, agents.address))
            log_failure(self._announcing, "the gateway is not told of this generator any more")
        return str(ray.get_runtime_context().get_node_id())

    @property
    def _is_set_up(self) -> bool:
        return self._joined is not None

    def _set_up(self) -> Membership:
        if self._joined is None:
            raise ProcessLost(f"{self._name} was restarted and is not set up")
        return self._joined

    async def _join(self) -> Membership:
        incarnation = await self._ask(self._buffer.join, "generator", self._name, None, self._player.resumes)
        deadline = self._config.run.stall_deadline
        claim, submit = partial(self._ask, self._buffer.claim), partial(self._ask, self._buffer.submit)
        return Membership(
            Claimer(self._name, incarnation, claim, lambda: self._engine.serving, deadline),
            Outbox(self._name, incarnation, submit, deadline, self._cancel, self._unmeasured.append),
        )

    async def run(self) -> None:
        """Claim groups, play them and submit their steps, until the buffer is drained or `stop` is called.

        Raises:
            RunFailed: the engine died, another incarnation took this generator's place, or too many environments did
                not return after they were cancelled.
            Starved: the buffer did not answer within its deadline.
            ProcessLost: this process has not been started.
        """
        self._main = asyncio.ensure_future(self._claim_and_play(*self._set_up()))
        try:
            await self._main
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        except BaseExceptionGroup as group:
            raise self._failed(first_error(group)) from group

    async def _claim_and_play(self, claimer: Claimer, outbox: Outbox) -> None:
        self._activity.begin()
        async with asyncio.TaskGroup() as helpers:
            background = [helpers.create_task(self._vital(each)) for each in (outbox.run, self._watch_engine)]
            if self._player.agents is not None:
                self._player.agents.calls_again = partial(self._tell, claimer.incarnation, call=True)
                renew = partial(self._renew, claimer.incarnation, self._player.agents)
                background.append(helpers.create_task(self._vital(renew)))
            async with asyncio.TaskGroup() as groups:
                while True:
                    # Moved sessions of agents need no room: most of the time they wait for their agents.
                    while self._is_full and not (self._player.resumes or claimer.leaves or claimer.arrived):
                        self._room.clear()
                        await self._room.wait()
                    assignment = await self._vital(partial(claimer.next, self._room_for_groups))
                    if assignment is None:
                        break
                    reason = claimer.waited_for
                    if (idle_seconds := self._activity.busy(reason)) is not None:
                        self._metrics.observe("baton_generator_wait_seconds", idle_seconds, reason=reason)
                    self._begin(groups, outbox, assignment)
            await outbox.flush()
            for task in background:
                task.cancel()

    def _begin(self, groups: asyncio.TaskGroup, outbox: Outbox, assignment: Assignment) -> None:
        self._groups += 1
        groups.create_task(self._play_group(outbox, assignment, task_of(self._tasks, *assignment[1:3])))

    @property
    def _is_full(self) -> bool:
        return self._groups >= self._limit.groups

    def _room_for_groups(self) -> int:
        return 0 if self._is_full else self._limit.room(self._groups)

    def _has_room(self) -> None:
        self._room.set()
        if self._joined is not None:
            self._joined.claimer.has_room()

    async def _vital(self, work: Callable[[], Awaitable[Done]]) -> Done:
        """Do work whose failure ends this process. A failure first closes the agents' connections without an answer, so
        that their calls continue in another generator."""
        try:
            return await work()
        except Exception:  # raised again: after any error this process ends
            self._player.abandon()
            raise

    async def _renew(self, incarnation: int, agents: AgentPlayer) -> None:
        """Tell the buffer which sessions are open. (A session may wait longer for its agent than the buffer waits for a
        step.)"""
        while True:
            await asyncio.sleep(self._config.buffer.step_deadline / RENEWALS)
            await self._tell(incarnation, agents.open_trajectories())

    async def _tell(self, incarnation: int, trajectories: Sequence[TrajectoryId], call: bool = False) -> bool:
        """Tell the buffer that trajectories continue. `call`: they moved here, and now call the policy. Returns False
        if the buffer did not answer. (The next renewal comes long before the deadline.)"""
        with suppress(Unreachable, TimeoutError):
            async with asyncio.timeout(TELL_SECONDS):
                await self._ask(self._buffer.renew, self._name, incarnation, trajectories, call)
            return True
        return False

    async def _play_group(self, outbox: Outbox, assignment: Assignment, task: Task) -> None:
        try:
            async with asyncio.TaskGroup() as samples:
                for trajectory, sent in assignment.trajectories():
                    for older in range(trajectory.attempt):
                        self._cancel(trajectory._replace(attempt=older))
                    if trajectory.sample in assignment.moved and not self._restored(outbox, trajectory, task, sent):
                        continue
                    playing = samples.create_task(self._vital(partial(self._play, outbox, trajectory, task)))
                    self._playing[trajectory] = playing
                    # A callback, because a task that is cancelled before it starts runs no line of `_play`.
                    playing.add_done_callback(partial(self._playing.pop, trajectory))
            outbox.group_complete(last=self._groups == 1)
        finally:
            self._groups -= 1
            self._has_room()
            if self._groups == 0:
                self._activity.idle()

    def _restored(self, outbox: Outbox, trajectory: TrajectoryId, task: Task, sent: bytes) -> bool:
        """Open a session again that another generator began. Returns False if this is impossible; then the trajectory
        starts again."""
        steps = accepted_group(sent).steps if sent else steps_table(())
        if is_restored := self._player.restore(trajectory, task, steps, outbox):
            self._counts["moved"] += 1
        else:
            outbox.end(TrajectoryEnd(trajectory, task.uid, len(steps), StopReason.ABORT, 0.0))
        return is_restored

    async def _play(self, outbox: Outbox, trajectory: TrajectoryId, task: Task) -> None:
        end = await self._player.play(trajectory, task, outbox)
        self._counts[f"end_{end.stop_reason}"] += 1

    def _cancel(self, trajectory: TrajectoryId) -> None:
        if (playing := self._playing.get(trajectory)) is not None:
            playing.cancel()

    async def update_weights(self, version: int, data: WeightBytes | Sequence[Source], checksum: int) -> None:
        """Load new weights into the engine while requests run.

        `version`: a packed `PolicyVersion`; for `data` and `checksum` see `VllmEngine.update_weights`.

        Raises:
            ValueError: the weights do not fit the policy. The engine keeps the old weights. WeightsGone: the weights
            are gone or were replaced; see `VllmEngine.update_weights`.
            RunFailed: the engine could not load the weights; this process ends.
            ProcessLost: this process has not been started.
        """
        claimer, _ = self._set_up()
        try:
            update = await self._engine.update_weights(PolicyVersion.unpack(version), data, checksum)
        except RunFailed as error:
            if self._stopping:  # no call waits for the update
                raise
            self._metrics.count("baton_weight_sync_failures_total")
            raise self._failed(error) from error.__cause__
        claimer.look_again()
        self._metrics.observe("baton_weight_sync_pause_seconds", update.pause_seconds)
        self._metrics.count("baton_weight_sync_bytes_total", update.bytes)

    async def evaluate(self, name: str, tasks_file: str, n_samples: int, shard: EvalShard) -> list[EvalTrajectory]:
        """Sample trajectories of one shard of an evaluation set. They are not submitted to the buffer.

        Raises:
            RunFailed: the engine died.
            ProcessLost: this process has not been started.
        """
        self._set_up()
        concurrency = self._limit.groups * self._config.algorithm.n_samples_per_prompt
        file, temperature, check = Path(tasks_file), self._config.data.eval_temperature, self._engine.check_alive
        with self._activity.evaluating():
            return await play_shard(self._player, name, file, n_samples, shard, concurrency, temperature, check)

    async def status(self) -> dict[str, Any]:
        """Return the generator's waits and failures, and its counts since the start."""
        outbox, agents = self._joined.outbox if self._joined is not None else None, self._player.agents
        return {
            "name": self._name,
            "pid": os.getpid(),
            "elapsed_seconds": self._activity.elapsed,
            "wait_seconds": self._activity.seconds,
            "counts": dict(self._counts),
            "failures": self._player.failures | (outbox.last_refusals if outbox is not None else {}),
            "sessions": sum(not isinstance(of, EvaluationId) for of in agents.open_trajectories()) if agents else 0,
            "refusals": dict(outbox.refusals) if outbox is not None else {},
        }

    @ray.method(concurrency_group=WATCHING)  # type: ignore[untyped-decorator]
    async def blocked(self, known: int) -> str:
        """Wait until code in more than `known` places has blocked this generator's event loop. Returns the message
        about place number `known`, counted from 0. Runs in a separate event loop.

        Raises:
            ProcessLost: this process has not been started.
        """
        self._set_up()
        return await self._watch.blocked(known)  # type: ignore[union-attr]

    async def share(self, groups: int) -> None:
        """Set this generator's share of the groups that all generators play at once."""
        self._limit.share(groups)
        self._has_room()

    async def leave(self, grace: float) -> None:
        """Claim no more groups, and continue the open groups for `grace` seconds. Then hand over the trajectories that
        are still open, and let `run` return."""
        if self._joined is None:
            return
        claimer, outbox = self._joined
        claimer.leave()
        self._room.set()
        if self._playing:
            await asyncio.wait(self._playing.values(), timeout=grace)
        self._player.abandon()
        for trajectory in list(self._playing):
            self._cancel(trajectory)
        await outbox.flush()
        await self._ask(self._buffer.leave, self._name, claimer.incarnation, LEAVES)

    async def stop(self, resumable: bool) -> None:
        """End the open trajectories and the engine. In a `resumable` run, programs that agents started elsewhere
        continue."""
        self._stopping = True
        if resumable:
            self._player.abandon()
        if self._main is not None:
            self._main.cancel()
            await asyncio.wait([self._main])
        if self._announcing is not None:
            self._announcing.cancel()
        self._reporter.stop()
        await self._player.close()
        await asyncio.to_thread(self._engine.stop)

    def _measure_now(self, metrics: Metrics) -> None:
        measure_steps(metrics, self._unmeasured)
        self._unmeasured.clear()
        measure_states(metrics, self._activity.by_state())
        metrics.set("baton_generator_group_limit", self._limit.groups)
        metrics.set("baton_generator_evaluating", self._activity.is_evaluating)
        self._player.measure(metrics, self._reporter.trace)
        self._engine.measure(metrics)

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self._engine.check(self._config.generator.request_deadline)
            if (load := self._engine.load) is not None and self._limit.observe(load, self._groups) > self._groups:
                self._has_room()

    async def _ask(self, method: Any, *arguments: Any) -> Any:
        try:
            return await method.remote(*arguments)
        except ray.exceptions.RayActorError as error:
            raise Unreachable(str(error)) from error

    def _failed(self, error: BaseException) -> BaseException:
        log.error("%s failed: %s", self._name, error)
        asyncio.get_running_loop().call_later(EXIT_SECONDS, os._exit, 1)
        return error
