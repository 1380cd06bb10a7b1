"""Plays trajectories of one model on one engine, for training and for evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import xxhash

from service.agents.agents import Agents
from service.agents.session_keys import Keys
from service.config import Config
from service.evaluation.scores import EvalShard, EvalTrajectory
from service.handoff.steps.builder import StepColumns, StepSink
from service.handoff.steps.tables import is_truncated_K
from service.observe.measure import measure_ended
from service.observe.metrics import Metrics
from service.observe.recorder import Trace
from service.rollout.agent import Played, run_trajectory
from service.rollout.chat.chat import load_chat
from service.rollout.chat.frozen import FrozenModels, Served
from service.rollout.engine import Engine
from service.rollout.env_guard import EnvGuard, LeakedTasks
from service.rollout.environment import Task
from service.rollout.environments.env_metrics import EnvMetrics
from service.rollout.environments.factory import Environments
from service.rollout.limits import AgentLimits
from service.rollout.prompts.dataset import load_tasks
from service.rollout.timelines import TimedEngine, Timelines
from service.types import Steps, TrajectoryEnd, TrajectoryId


class Player:
    """Plays trajectories in the process of their engine."""

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        engine: Engine,
        keys: Keys | None = None,
        number: int = 0,
        served: Served | None = None,
    ) -> None:
        """`keys`, `number`: those of `Agents`; `served`: that of `FrozenModels`."""
        self._config = config
        self.timelines = Timelines(config.generator.min_engines)
        self._engine: Engine = TimedEngine(engine, self.timelines)
        self._chat = load_chat(model_folder, config.generator)
        self._limits = AgentLimits.of(config, self._chat)
        self._frozen = FrozenModels(config.roles, served)
        self._environments = Environments(config.env)
        self.agents: Agents | None = None
        if config.endpoint is not None:
            self.agents = Agents(config.endpoint, self._chat, self._engine, self._limits, keys, number)
        self.last_failure = ""
        """Why the most recent lost trajectory was lost."""
        self.leaked = LeakedTasks()
        self.env_metrics = EnvMetrics()
        """The `info` of the environments, summed over the trajectories played for training."""
        self._ended: list[tuple[TrajectoryEnd, str]] = []
        """Trajectories of training that ended and are not measured yet, each with its environment."""

    async def play(
        self, trajectory: TrajectoryId, task: Task, sink: StepSink, left: Steps | None = None
    ) -> TrajectoryEnd:
        """Play one trajectory for training; its steps and its end go to `sink`.

        `left`: the steps that another generator played of it, after which it goes on.

        Raises:
            RunFailed: too many environments did not return after they were cancelled; this process has to be renewed.
        """
        # All samples of a group share the environment's seed, so that only the policy differs.
        env = task.env_class or self._config.env.name
        with self.timelines.playing(trajectory, env) as line:
            played = await self._play(trajectory, task, sink, f"{self._config.run.seed}/{trajectory.group_id}", left)
            self.timelines.ended(trajectory, line, played.end.stop_reason)
        self._ended.append((played.end, env))
        if not played.failure:
            self.env_metrics.add(env, played.info)
        return played.end

    def restore(self, trajectory: TrajectoryId, task: Task, steps: Steps, sink: StepSink) -> bool:
        """Prepare to go on with a trajectory of an earlier process; `play` then goes on with it.

        False where that is not possible: who played it ended with that process, or its steps are no session.
        """
        if self.agents is None or not self._environments.is_outside(task):
            return False
        return self.agents.restore(trajectory, deepcopy(task), steps, sink)

    async def evaluate(
        self,
        name: str,
        tasks_file: Path,
        n_samples: int,
        shard: EvalShard,
        concurrency: int,
        check: Callable[[], None] = lambda: None,
    ) -> list[EvalTrajectory]:
        """Play `n_samples` trajectories of every task of a shard, at most `concurrency` at once.

        `check` is called before each trajectory and after the last; what it raises ends the evaluation.
        The environments' seeds depend on set and prompt only. The group_ids are negative; those of training start at 0.
        """
        tasks = await asyncio.to_thread(load_tasks, tasks_file)
        if (temperature := self._config.data.eval_temperature) is not None:
            tasks = [replace(task, temperature=temperature) for task in tasks]
        running = asyncio.Semaphore(concurrency)

        async def play(row: int, sample: int) -> EvalTrajectory:
            columns, uid = StepColumns(), tasks[row].uid
            async with running:
                check()
                seed = f"{self._config.run.seed}/eval/{name}/{uid}"
                end = (await self._play(TrajectoryId(-1 - row, sample), tasks[row], columns, seed)).end
            steps = columns.steps()
            n_tokens, n_truncated = int(steps.loss_mask_N.sum()), int(is_truncated_K(steps).sum())
            return EvalTrajectory(uid, end.reward, end.n_steps, n_tokens, end.stop_reason, n_truncated)

        rows = shard.rows(len(tasks))
        played = await asyncio.gather(*(play(row, sample) for row in rows for sample in range(n_samples)))
        check()
        return played

    def measure(self, metrics: Metrics, trace: Trace) -> None:
        """Measure what was played; trajectories of training once, after they ended, and in the timeline."""
        self.timelines.measure(metrics)
        self.timelines.record(trace)
        measure_ended(metrics, self._ended)
        self._ended.clear()
        self._frozen.measure(metrics)
        metrics.set("baton_environment_leaked_tasks", len(self.leaked))
        if self.agents is not None:
            self.agents.measure(metrics)

    async def close(self) -> None:
        """End the processes of the environments."""
        await self._environments.close()
        await self._frozen.close()
        if self.agents is not None:
            await self.agents.close()

    async def _play(
        self, trajectory: TrajectoryId, task: Task, sink: StepSink, seed: str, left: Steps | None = None
    ) -> Played:
        self.leaked.check()
        own, number = deepcopy(task), xxhash.xxh3_64_intdigest(seed.encode()) & 0x7FFFFFFF  # a row is shared
        async with self._environments.room:
            agents = self.agents if self.agents is not None and self._environments.is_agent(task) else None
            limits = self._limits if agents is None else agents.limits
            name, make = task.env_class or self._config.env.name, partial(self._environments.make, task)
            guard = EnvGuard(name, make, limits, self.leaked, partial(self.timelines.answered, trajectory))
            if agents is not None:
                here = None if self._environments.is_outside(task) else guard
                played = await agents.play(trajectory, own, here, number, sink)
            else:
                speakers = self._engine, self._chat, limits, number, sink, self._frozen, left
                played = await run_trajectory(trajectory, own, guard, *speakers)
        self.last_failure = played.failure or self.last_failure
        return played
