"""Evaluates a set on several engines. Also defines an actor whose engine only evaluates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.calls import call
from actors.engine.run_player import RunPlayer
from actors.engine.vllm_engine import VllmEngine
from actors.observe.actor_logs import keep_log
from service.config import Config
from service.evaluation.play import play_shard
from service.evaluation.scores import EvalShard, EvalTrajectory, Evaluation, summarize
from service.types import PolicyVersion
from service.user_code import enter_user_folder


async def evaluate_on(
    engines: Sequence[Any], name: str, tasks_file: Path, n_samples: int, most: int | None = None
) -> Evaluation:
    """Evaluate a set, or a sample of `most` prompts of it, on several generators or evaluators.

    The prompts are split among the engines; the result summarizes all trajectories.
    """
    shards = [EvalShard(number, len(engines), most) for number in range(len(engines))]
    played = await asyncio.gather(
        *(
            call(engine.evaluate, name, str(tasks_file), n_samples, shard, who="an engine", within=None)
            for engine, shard in zip(engines, shards, strict=True)
        )
    )
    return summarize(name, [trajectory for of_shard in played for trajectory in of_shard])


class Evaluator:
    """One engine that evaluates one model. This is a plain class, which the caller wraps as a Ray actor."""

    def __init__(self, config_json: str, model_folder: str, name: str) -> None:
        keep_log(name)
        enter_user_folder()
        self._config = Config.model_validate_json(config_json)
        self._engine = VllmEngine(self._config, Path(model_folder))
        self._player = RunPlayer(self._config, Path(model_folder), self._engine)

    async def start(self) -> None:
        """Start the engine; raises the errors of the engine's start."""
        await self._engine.start(PolicyVersion(0, 0))
        self._player.load()

    async def evaluate(self, name: str, tasks_file: str, n_samples: int, shard: EvalShard) -> list[EvalTrajectory]:
        """Sample trajectories of one shard of an evaluation set."""
        groups = -(-self._config.generator.concurrent_groups // self._config.generator.min_engines)
        concurrency = groups * self._config.algorithm.n_samples_per_prompt
        file, temperature = Path(tasks_file), self._config.data.eval_temperature
        return await play_shard(self._player, name, file, n_samples, shard, concurrency, temperature)

    async def stop(self) -> None:
        """End the engine."""
        await self._player.close()
        await asyncio.to_thread(self._engine.stop)
