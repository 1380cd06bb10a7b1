"""A generator: one engine and the agent loops beside it.

    claim a group -> play its samples side by side -> every finished step into the outbox -> claim the next

Weights change under the running trajectories; each token knows which version sampled it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray.exceptions
import xxhash

from actors.engine import VllmEngine
from actors.outbox import Outbox, Unreachable
from actors.weights_file import WeightBytes
from service.config import Config
from service.errors import RunFailed, Starved
from service.handoff.verbs import Assignment, Claim, Wait, WaitReason
from service.rollout.agent import AgentLimits, run_trajectory
from service.rollout.chat import Chat
from service.rollout.dataset import load_tasks
from service.rollout.environment import Task
from service.rollout.environments import environment
from service.rollout.tokenizer import load_tokenizer
from service.types import PolicyVersion, Refusal, Step, TrajectoryEnd, TrajectoryId

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0
"""Length of one long poll for work."""
RETRY_SECONDS = 0.2
"""Pause before an unreachable buffer is asked for work again."""
HEALTH_SECONDS = 5.0
"""Seconds between two looks at the engine."""
EXIT_SECONDS = 1.0
"""Seconds that a failure has to reach the callers before this process ends."""
EVALUATION = -1
"""Ordinal of trajectories that the buffer never sees."""


class IdleTime:
    """How long nothing was there to generate."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._since: float | None = None
        self._seconds = 0.0

    def begin(self) -> None:
        """Start measuring; there is nothing to do yet."""
        self._began = self._since = time.monotonic()

    def busy(self) -> None:
        """There is something to generate."""
        if self._since is not None:
            self._seconds += time.monotonic() - self._since
            self._since = None

    def idle(self) -> None:
        """There is nothing to generate any more."""
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds without work so far."""
        return self._seconds + (time.monotonic() - self._since if self._since is not None else 0.0)

    @property
    def elapsed(self) -> float:
        """Seconds since `begin`."""
        return time.monotonic() - self._began if self._began is not None else 0.0


class Generator:
    """Generates for one buffer until that has nothing more to give; it becomes a Ray actor at the door."""

    def __init__(self, name: str, config_json: str, model_folder: str, tasks_file: str, buffer: Any) -> None:
        self._name = name
        self._config = Config.model_validate_json(config_json)
        self._buffer = buffer
        self._tasks = load_tasks(Path(tasks_file))
        self._chat = Chat(load_tokenizer(Path(model_folder)))
        self._limits = AgentLimits.of(self._config, self._chat)
        self._engine = VllmEngine(self._config, Path(model_folder))
        self._max_groups = -(-self._config.generator.concurrent_groups // self._config.generator.engines)
        self._groups = 0
        self._playing: dict[TrajectoryId, asyncio.Task[None]] = {}
        self._room = asyncio.Event()
        self._newer = asyncio.Event()
        """Set when the engine serves a newer version than the one that the last claim names."""
        self._outbox: Outbox | None = None
        self._epoch = 0
        self._waiting: Wait | None = None
        self._idle = IdleTime()
        self._work: asyncio.Task[None] | None = None
        self._stopping = False
        self._counts: Counter[str] = Counter()
        self._paused_seconds = 0.0

    def __repr__(self) -> str:
        return f"Generator({self._name})"

    async def start(self) -> None:
        """Bring the engine up and join the buffer."""
        deadline = self._config.generator.start_deadline
        try:
            async with asyncio.timeout(deadline):
                await self._engine.start(PolicyVersion(0, 0))
        except TimeoutError as error:
            raise self._failed(Starved(f"{self._name}: the engine did not start within {deadline:.0f} s")) from error
        self._epoch = await self._ask(self._buffer.join, "generator", self._name)
        self._outbox = Outbox(
            self._name,
            self._epoch,
            submit=lambda data: self._ask(self._buffer.submit, data),
            deadline=self._config.run.stall_deadline,
            on_closed=self._close,
            on_refused=self._cancel,
        )

    async def run(self) -> None:
        """Claim, play and submit until the buffer is drained or `stop` is called.

        Raises:
            RunFailed: the engine died, or another incarnation took this generator's place.
            Starved: the buffer did not answer within its deadline.
        """
        if self._outbox is None:
            raise RuntimeError("run() before start()")
        self._work = asyncio.ensure_future(self._claim_and_play(self._outbox))
        try:
            await self._work
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        except BaseExceptionGroup as group:
            raise self._failed(_first(group)) from group

    async def _claim_and_play(self, outbox: Outbox) -> None:
        self._idle.begin()
        async with asyncio.TaskGroup() as helpers:
            background = [helpers.create_task(outbox.run()), helpers.create_task(self._watch_engine())]
            async with asyncio.TaskGroup() as groups:
                open_group = partial(self._open, groups, outbox)
                while (assignment := await self._claim(open_group)) is not None:
                    open_group(assignment)
            await outbox.flush()
            for task in background:
                task.cancel()

    async def _claim(self, open_group: Callable[[Assignment], None]) -> Assignment | None:
        """The next group to play, as soon as there is room for it; None when no more will come."""
        seconds = 0.0
        while True:
            while self._groups >= self._max_groups:
                self._room.clear()
                await self._room.wait()
            answer = await self._poll(open_group, seconds)
            if isinstance(answer, Assignment):
                self._waiting = None
                return answer
            if isinstance(answer, Refusal):
                raise RunFailed(f"the buffer refused work to {self._name}: {answer}")
            # The first answer comes at once and gives the reason; only then is waiting worth a long poll.
            seconds = POLL_SECONDS
            if answer is not None:
                self._waiting = answer
                if answer.reason == WaitReason.DRAINED:
                    return None

    async def _poll(
        self, open_group: Callable[[Assignment], None], seconds: float
    ) -> Assignment | Wait | Refusal | None:
        """Ask for work; None when nobody answered, or a newer version makes another claim worth while."""
        self._newer.clear()
        claim = Claim(self._name, self._epoch, self._engine.serving)
        poll = asyncio.ensure_future(self._ask(self._buffer.claim, claim, seconds))
        newer = asyncio.ensure_future(self._newer.wait())
        await asyncio.wait([poll, newer], return_when=asyncio.FIRST_COMPLETED)
        newer.cancel()
        if not poll.done():
            # It is left to end by itself: a group that it still brings is as good as any other.
            poll.add_done_callback(partial(_take_late, open_group))
            return None
        try:
            answer: Assignment | Wait | Refusal = poll.result()
        except Unreachable:
            self._counts["buffer_unreachable"] += 1
            await asyncio.sleep(RETRY_SECONDS)
            return None
        return answer

    def _open(self, groups: asyncio.TaskGroup, outbox: Outbox, assignment: Assignment) -> None:
        task = self._tasks[assignment.row]
        if task.uid != assignment.prompt_uid:
            raise RunFailed(
                f"row {assignment.row} of the dataset is {task.uid}, but the buffer means {assignment.prompt_uid}: "
                "the dataset changed under the run"
            )
        self._groups += 1
        self._counts["groups"] += 1
        groups.create_task(self._play_group(outbox, assignment, task))

    async def _play_group(self, outbox: Outbox, assignment: Assignment, task: Task) -> None:
        try:
            async with asyncio.TaskGroup() as samples:
                for sample, attempt in zip(assignment.samples, assignment.attempts, strict=True):
                    trajectory = TrajectoryId(assignment.ordinal, sample, attempt)
                    self._cancel_older(trajectory)
                    self._idle.busy()
                    self._playing[trajectory] = samples.create_task(self._play(outbox, trajectory, task))
        finally:
            self._groups -= 1
            self._room.set()

    async def _play(self, outbox: Outbox, trajectory: TrajectoryId, task: Task) -> None:
        try:
            async for item in self._episode(trajectory, task):
                if isinstance(item, TrajectoryEnd):
                    self._counts["trajectories"] += 1
                    self._counts[f"end_{item.stop_reason}"] += 1
                outbox.put(item)
        finally:
            self._playing.pop(trajectory, None)
            if not self._playing:
                self._idle.idle()

    def _episode(self, trajectory: TrajectoryId, task: Task) -> AsyncIterator[Step | TrajectoryEnd]:
        return run_trajectory(
            trajectory,
            task,
            environment(task.env_class or self._config.env.name, self._config.env.options),
            self._engine,
            self._chat,
            self._limits,
            seed=_episode_seed(self._config.run.seed, trajectory.ordinal),
        )

    def _close(self, ordinal: int) -> None:
        for trajectory in [t for t in self._playing if t.ordinal == ordinal]:
            self._cancel(trajectory)

    def _cancel_older(self, trajectory: TrajectoryId) -> None:
        for attempt in range(trajectory.attempt):
            self._cancel(trajectory._replace(attempt=attempt))

    def _cancel(self, trajectory: TrajectoryId) -> None:
        playing = self._playing.get(trajectory)
        if playing is not None:
            self._counts["cancelled"] += 1
            playing.cancel()

    async def update_weights(self, version: int, data: WeightBytes, checksum: int) -> dict[str, float]:
        """Swap the engine's weights under the running requests; `version` is packed, `checksum` the data's xxh3_64.

        Raises:
            ValueError: the bytes are not the policy's weights; the engine goes on with the old ones.
            RunFailed: the engine could not load them; this process ends.
        """
        try:
            update = await self._engine.update_weights(PolicyVersion.unpack(version), data, checksum)
        except RunFailed as error:
            raise self._failed(error) from error.__cause__
        self._newer.set()
        self._counts["updates"] += 1
        self._paused_seconds += update.pause_seconds
        return update._asdict()

    async def evaluate(self, rows: Sequence[int], n: int) -> list[float]:
        """Final rewards of `n` sampled trajectories of each row, in order; the buffer sees none of them."""
        ids = [(row, TrajectoryId(EVALUATION, i * n + sample)) for i, row in enumerate(rows) for sample in range(n)]
        return list(await asyncio.gather(*(self._reward(trajectory, self._tasks[row]) for row, trajectory in ids)))

    async def _reward(self, trajectory: TrajectoryId, task: Task) -> float:
        reward = 0.0
        async for item in self._episode(trajectory, task):
            reward = item.reward if isinstance(item, TrajectoryEnd) else reward
        return reward

    async def status(self) -> dict[str, Any]:
        """What the generator does right now and has done so far."""
        outbox = self._outbox
        elapsed = self._idle.elapsed
        engine = self._engine.counts
        return {
            "name": self._name,
            "epoch": self._epoch,
            "policy_version": str(self._engine.serving),
            "groups": self._groups,
            "trajectories": len(self._playing),
            "elapsed_seconds": elapsed,
            "wait_seconds": self._idle.seconds,
            "waiting": self._waiting._asdict() if self._waiting is not None else None,
            "paused_seconds": self._paused_seconds,
            "tokens_per_second": engine["generated_tokens"] / elapsed if elapsed else 0.0,
            "counts": dict(self._counts),
            "engine": dict(engine),
            "outbox": dict(outbox.counts) if outbox is not None else {},
            "refusals": dict(outbox.refusals) if outbox is not None else {},
        }

    async def stop(self) -> None:
        """End the open trajectories and the engine."""
        self._stopping = True
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
        await asyncio.to_thread(self._engine.stop)

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            await self._engine.check(self._config.generator.request_deadline)

    async def _ask(self, method: Any, *arguments: Any) -> Any:
        """Call the buffer.

        Raises:
            Unreachable: the call or its answer was lost.
        """
        try:
            return await method.remote(*arguments)
        except ray.exceptions.RayActorError as error:
            raise Unreachable(str(error)) from error

    def _failed(self, error: BaseException) -> BaseException:
        """End this process once the callers know the error: what is left of a broken engine must serve nobody."""
        log.error("%s failed: %s", self._name, error)
        asyncio.get_running_loop().call_later(EXIT_SECONDS, os._exit, 1)
        return error


def _take_late(open_group: Callable[[Assignment], None], poll: asyncio.Future[Any]) -> None:
    if not poll.cancelled() and poll.exception() is None and isinstance(poll.result(), Assignment):
        open_group(poll.result())


def _episode_seed(seed: int, ordinal: int) -> int:
    """The same for all samples of a group, so that they differ by the policy alone."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{ordinal}".encode()) & 0x7FFFFFFF


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error behind nested groups; the first one, for the others follow from it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
