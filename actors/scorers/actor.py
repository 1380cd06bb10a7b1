"""The Ray actor of a scorer. The buffer's process calls it with the code in `workers.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from actors.calls import call, started
from actors.deaths import Supervised
from actors.observe.actor_logs import keep_log
from actors.scorers.workers import actor_names
from service.config import Config
from service.config.rollout import ScorerConfig
from service.rollout.prompts.dataset import load_tasks
from service.scorers.reply import Failure, ScorerFailed
from service.scorers.scorer import Scorer

if TYPE_CHECKING:
    from actors.scorers.teacher_engine import TeacherEngine


class ScorerActor(Supervised):
    """One process of a scorer; the caller wraps it as a Ray actor."""

    def __init__(self, config_json: str, name: str, model_folder: str, tasks_file: str) -> None:
        keep_log(f"scorer-{name}")
        self._failure: Exception | None = None
        self._scorer: Scorer | None = None
        self._engine: TeacherEngine | None = None
        config = Config.model_validate_json(config_json)
        teacher = config.scorers[name].model
        try:
            if teacher is not None:
                # Imported here: without torch and transformers, other scorers' actors start seconds sooner.
                from actors.scorers.teacher_engine import TeacherEngine

                self._engine = TeacherEngine(config, teacher)
            engine = None if self._engine is None else self._engine.logprobs
            files = Path(model_folder), load_tasks(Path(tasks_file))
            self._scorer = Scorer(name, config.scorers[name], tuple(config.roles), *files, engine)
        except Exception as error:  # noqa: BLE001 - raised by `ready`
            # Ray would restart an actor whose constructor raises again and again.
            self._failure = error

    async def ready(self) -> str:
        """Wait until groups can be scored. Returns a unique name of this process.

        Raises the error that kept the scorer from starting.
        """
        if self._failure is not None:
            raise self._failure
        if self._engine is not None:
            await self._engine.start()
        return self._process

    async def reply(self, row: int, group: bytes) -> bytes:
        """Return the reply about a group; see `Scorer.reply`."""
        if self._scorer is None:
            raise ScorerFailed(Failure.START, str(self._failure))
        return await self._scorer.reply(row, group)


def place_scorers(
    scorers: Mapping[str, ScorerConfig],
    config_json: str,
    model_folder: Path,
    tasks_file: Path,
    engine_env: Mapping[str, str],
    has_gpu: bool,
) -> dict[str, Any]:
    """Start the actors of all scorers. Returns the actors by name. They share no CPU or GPU with ranks and engines.

    `engine_env`: environment variables of a process with an engine.
    """
    return {
        actor: ray.remote(ScorerActor)
        .options(
            name=actor,
            max_restarts=-1,
            max_concurrency=1000,
            num_cpus=scorers[name].cpus,
            num_gpus=scorers[name].gpus if has_gpu else 0,
            runtime_env={"env_vars": {**engine_env}} if scorers[name].model is not None else {},
        )
        .remote(config_json, name, str(model_folder), str(tasks_file))
        for name, actors in actor_names(scorers).items()
        for actor in actors
    }


async def all_up(actors: Iterable[Any], within: float) -> None:
    """Wait until every actor is ready, for at most `within` seconds. Raises the error of an actor that cannot start: it
    ends the run before its first step."""
    ready = (partial(call, actor.ready, who="a scorer", within=within) for actor in actors)
    await asyncio.gather(*(started(each, within) for each in ready))
