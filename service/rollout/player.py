"""Plays trajectories of one model on one inference engine, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Protocol

import xxhash

from service.observe.measure import measure_ended
from service.observe.metrics import Metrics
from service.observe.recorder import Trace
from service.rollout.agent_loop import TrajectoryResult, run_trajectory
from service.rollout.chat.chat import Chat, load_chat
from service.rollout.chat.frozen import FrozenModels
from service.rollout.engine import AgentLimits, Engine, PlaySettings
from service.rollout.env_guard import EnvGuard, LeakedTasks
from service.rollout.environment import Task
from service.rollout.factory import AgentMaker, Environments
from service.rollout.step_sinks import StepSink
from service.rollout.timelines import TimedEngine, Timelines
from service.types import Steps, TrajectoryEnd, TrajectoryId


class AgentPlayer(Protocol):
    """Plays the trajectories of agents that call the policy over HTTP. A `Player` has an `AgentPlayer` only if agents
    can call the policy."""

    limits: AgentLimits

    def load(self) -> None:
        """Load the parser of the policy's responses; called when the engine runs."""

    address: str
    """The address of this process's endpoint."""

    calls_again: Callable[[list[TrajectoryId]], Awaitable[bool]] | None
    """In a restored trajectory it is awaited before each call of the policy, until it has returned True once."""

    async def listen(self) -> None:
        """Start to serve `address`, unless it is served already."""

    def open_trajectories(self) -> list[TrajectoryId]:
        """The trajectories that wait for their agents or for the policy."""

    def restore(self, trajectory: TrajectoryId, task: Task, steps: Steps, sink: StepSink) -> bool:
        """Prepare to continue a trajectory that another process began; returns False if that is impossible."""

    def abandon(self) -> None:
        """Stop answering requests of agents, so that another generator can continue their sessions."""

    async def play(
        self, trajectory: TrajectoryId, task: Task, guard: EnvGuard, seed: int, sink: StepSink
    ) -> TrajectoryResult:
        """Play one trajectory with the agent in `guard`."""

    def measure(self, metrics: Metrics) -> None:
        """Record metrics of the agents' trajectories and calls."""

    async def close(self) -> None:
        """Refuse further requests from agents."""


class Player:
    """Plays trajectories in the process of the engine that samples their turns."""

    def __init__(
        self,
        settings: PlaySettings,
        model_folder: Path,
        engine: Engine,
        agents: Callable[[Chat, Engine, AgentLimits], AgentPlayer | None] = lambda chat, engine, limits: None,
        commands: AgentMaker | None = None,
    ) -> None:
        """`agents`: makes the `AgentPlayer`, or returns None if agents cannot call the policy. `commands`: makes the
        agents of `env.command`."""
        self._settings = settings
        self.timelines = Timelines(settings.generator.min_engines)
        self._engine: Engine = TimedEngine(engine, self.timelines)
        self.chat = load_chat(model_folder, settings.generator)
        self._limits = AgentLimits.of(settings, self.chat.end_ids)
        self._frozen = FrozenModels(settings.roles)
        self._environments = Environments(settings.env, commands)
        self.agents = agents(self.chat, self._engine, self._limits)
        self.failures: dict[str, str] = {}
        """For each stop reason, the error of the newest trajectory that failed for this reason."""
        self.leaked = LeakedTasks()
        self._ended: list[tuple[TrajectoryEnd, str]] = []
        """Training trajectories that ended and are not measured yet, each with the name of its environment."""

    async def play(self, trajectory: TrajectoryId, task: Task, sink: StepSink) -> TrajectoryEnd:
        """Play one trajectory for training. Send its steps, and the record that ends it, to `sink`.

        Raises:
            RunFailed: too many environments did not return when cancelled; this process has to be restarted.
        """
        # All samples of a group share the environment's seed, so that only the policy differs.
        env = task.env_class or self._settings.env.name
        with self.timelines.playing(trajectory, env) as line:
            played = await self._play(trajectory, task, sink, str(trajectory.group_id))
            self.timelines.ended(line, played.end.stop_reason)
        self._ended.append((played.end, env))
        return played.end

    def load(self) -> None:
        """Load the parser of responses to agents; call it when the engine runs."""
        if self.agents is not None:
            self.agents.load()

    @property
    def resumes(self) -> bool:
        """Whether trajectories of the configured environment can be restored."""
        return self.agents is not None and self._environments.resumes()

    def restore(self, trajectory: TrajectoryId, task: Task, steps: Steps, sink: StepSink) -> bool:
        """Prepare to continue a trajectory that another process began; `play` then continues it.

        Returns False if that is impossible: only an agent with the method `resume` can be continued in another process.
        """
        if self.agents is None or not self._environments.resumes(task.env_class):
            return False
        return self.agents.restore(trajectory, deepcopy(task), steps, sink)

    def abandon(self) -> None:
        """Let another generator continue the sessions of agents, because this generator ends."""
        if self.agents is not None:
            self.agents.abandon()

    async def play_unmeasured(self, trajectory: TrajectoryId, task: Task, sink: StepSink, seed: str) -> TrajectoryEnd:
        """Play one trajectory as `play` does, but without metrics. For trajectories that do not go to the buffer, such
        as trajectories of an evaluation."""
        return (await self._play(trajectory, task, sink, seed)).end

    def measure(self, metrics: Metrics, trace: Trace) -> None:
        """Record the metrics of the training trajectories that ended since the last call, and write their timeline to
        `trace`."""
        self.timelines.measure(metrics)
        self.timelines.record(trace)
        measure_ended(metrics, self._ended)
        self._ended.clear()
        self._frozen.measure(metrics)
        metrics.set("baton_environment_leaked_tasks", len(self.leaked))
        if self.agents is not None:
            self.agents.measure(metrics)

    async def close(self) -> None:
        """End the processes of environments, the connections to frozen models, and the calls of agents."""
        await self._environments.close()
        await self._frozen.close()
        if self.agents is not None:
            await self.agents.close()

    async def _play(self, trajectory: TrajectoryId, task: Task, sink: StepSink, seed: str) -> TrajectoryResult:
        self.leaked.check()
        own = deepcopy(task)  # trajectories share the row
        number = xxhash.xxh3_64_intdigest(f"{self._settings.seed}/{seed}".encode()) & 0x7FFFFFFF
        async with self._environments.room:
            agents = self.agents if self.agents is not None and self._environments.is_agent(task) else None
            limits = self._limits if agents is None else agents.limits
            name, make = task.env_class or self._settings.env.name, partial(self._environments.make, task)
            guard = EnvGuard(name, make, limits, self.leaked, partial(self.timelines.answered, trajectory))
            if agents is not None:
                played = await agents.play(trajectory, own, guard, number, sink)
            else:
                speakers = self._engine, self.chat, limits, number, sink, self._frozen
                played = await run_trajectory(trajectory, own, guard, *speakers)
        if played.failure:
            self.failures[played.end.stop_reason] = played.failure
        return played
