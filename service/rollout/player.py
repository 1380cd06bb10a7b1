"""Plays trajectories of one model on one engine, for training and for evaluation."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import xxhash

from service.config import Config
from service.errors import UserError
from service.evaluation.scores import EvalShard, EvalTrajectory, play_eval_set
from service.handoff.steps.builder import StepSink
from service.rollout.agent import Played, lost_trajectory, run_trajectory
from service.rollout.chat.chat import load_chat
from service.rollout.engine import Engine
from service.rollout.environment import Task
from service.rollout.environments.env_metrics import EnvMetrics
from service.rollout.environments.factory import Environments
from service.rollout.limits import AgentLimits
from service.rollout.prompts.dataset import load_tasks
from service.types import TrajectoryEnd, TrajectoryId


class Player:
    """Plays trajectories in the process of their engine."""

    def __init__(self, config: Config, model_folder: Path, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._chat = load_chat(model_folder, config.generator)
        self._limits = AgentLimits.of(config, self._chat)
        self._environments = Environments(config.env)
        self.last_failure = ""
        """Why the most recent lost trajectory was lost."""
        self.env_metrics = EnvMetrics()
        """The `info` of the environments, summed over the trajectories played for training."""

    async def play(self, trajectory: TrajectoryId, task: Task, sink: StepSink) -> TrajectoryEnd:
        """Play one trajectory for training; its steps and its end go to `sink`."""
        # All samples of a group share the environment's seed, so that only the policy differs.
        played = await self._play(trajectory, task, sink, f"{self._config.run.seed}/{trajectory.group_id}")
        if not played.failure:
            self.env_metrics.add(task.env_class or self._config.env.name, played.info)
        return played.end

    async def evaluate(
        self, name: str, tasks_file: Path, n_samples: int, shard: EvalShard, concurrency: int
    ) -> list[EvalTrajectory]:
        """Play one shard of an evaluation set; the environments' seeds depend on set and prompt only."""
        temperature = self._config.data.eval_temperature

        async def play(trajectory: TrajectoryId, task: Task, sink: StepSink) -> TrajectoryEnd:
            sampled = task if temperature is None else replace(task, temperature=temperature)
            seed = f"{self._config.run.seed}/eval/{name}/{task.uid}"
            return (await self._play(trajectory, sampled, sink, seed)).end

        tasks = await asyncio.to_thread(load_tasks, tasks_file)
        return await play_eval_set(tasks, n_samples, play, concurrency, shard)

    async def close(self) -> None:
        """End the processes of the environments."""
        await self._environments.close()

    async def _play(self, trajectory: TrajectoryId, task: Task, sink: StepSink, seed: str) -> Played:
        async with self._environments.room:
            try:
                environment = self._environments.make(task)
            except UserError as error:  # the same constructor worked at the start
                played = lost_trajectory(trajectory, task, error, sink)
            else:
                played = await run_trajectory(
                    trajectory,
                    deepcopy(task),  # an environment may change its row, which other trajectories share
                    environment,
                    self._engine,
                    self._chat,
                    self._limits,
                    xxhash.xxh3_64_intdigest(seed.encode()) & 0x7FFFFFFF,
                    sink,
                )
        self.last_failure = played.failure or self.last_failure
        return played
