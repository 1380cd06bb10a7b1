"""Evaluation over several engines, and an engine that does nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.calls import call
from actors.generator.engine import VllmEngine
from service.config import Config
from service.errors import RunFailed
from service.evaluation.sets import Evaluation, Part, Played, summary
from service.rollout.player import Player
from service.types import PolicyVersion


async def evaluate_on(
    engines: Sequence[Any], name: str, tasks_file: Path, n_samples: int, most: int | None = None
) -> Evaluation:
    """Split a set over generators or evaluators, and put together what they played."""
    parts = [Part(number, len(engines), most) for number in range(len(engines))]
    played = await asyncio.gather(
        *(
            call(engine.evaluate, name, str(tasks_file), n_samples, part, who="an engine", within=None)
            for engine, part in zip(engines, parts, strict=True)
        )
    )
    return summary(name, [trajectory for part in played for trajectory in part])


class Evaluator:
    """One engine that evaluates a model; it becomes a Ray actor at the door."""

    def __init__(self, config_json: str, model_folder: str) -> None:
        self._config = Config.model_validate_json(config_json)
        self._engine = VllmEngine(self._config, Path(model_folder))
        self._player = Player(self._config, Path(model_folder), self._engine)

    async def start(self) -> None:
        """Bring the engine up.

        Raises:
            RunFailed: it did not start in time.
        """
        deadline = self._config.generator.start_deadline
        try:
            async with asyncio.timeout(deadline):
                await self._engine.start(PolicyVersion(0, 0))
        except TimeoutError as error:
            raise RunFailed(f"an engine did not start within {deadline:.0f} s") from error

    async def evaluate(self, name: str, tasks_file: str, n_samples: int, part: Part) -> list[Played]:
        """Sampled trajectories of a part of an evaluation set."""
        groups = -(-self._config.generator.concurrent_groups // self._config.generator.engines)
        concurrency = groups * self._config.algorithm.n_samples_per_prompt
        return await self._player.evaluate(name, Path(tasks_file), n_samples, part, concurrency)

    async def stop(self) -> None:
        """End the engine."""
        await self._player.close()
        await asyncio.to_thread(self._engine.stop)
