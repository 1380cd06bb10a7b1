"""A scorer's Ray actor, and the calls to it from the buffer's process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions

from actors.calls import call, in_a_line, started
from actors.deaths import Supervised
from actors.observe.actor_logs import keep_log
from service.config import Config
from service.config.rollout import RoleConfig, ScorerConfig
from service.rollout.prompts.dataset import load_tasks
from service.scorers.asking import Worker
from service.scorers.reply import Failure, ScorerFailed
from service.scorers.scorer import Scorer

if TYPE_CHECKING:
    from actors.scorers.frozen_model import FrozenEngine

RESTART_PAUSE = 0.2
"""Seconds between two checks of an actor that Ray restarts."""


class ScorerActor(Supervised):
    """One process of a scorer; the caller wraps it as a Ray actor."""

    def __init__(self, config_json: str, name: str, model_folder: str, tasks_file: str) -> None:
        keep_log(f"scorer-{name}")
        self._failure: Exception | None = None
        self._scorer: Scorer | None = None
        config = Config.model_validate_json(config_json)
        teacher = config.scorers[name].model
        try:
            self._engine = _frozen_engine(config, teacher) if teacher is not None else None
            engine = None if self._engine is None else self._engine.logprobs
            files = Path(model_folder), load_tasks(Path(tasks_file))
            self._scorer = Scorer(name, config.scorers[name], tuple(config.roles), *files, engine)
        except Exception as error:  # noqa: BLE001 - raised by `ready`
            # Ray would restart an actor whose constructor raises again and again.
            self._failure = error

    async def ready(self) -> str:
        """Wait until groups can be scored; returns a unique name of this process.

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


def _frozen_engine(config: Config, folder: Path) -> FrozenEngine:
    # An actor that scores without an engine starts several seconds sooner without torch and transformers.
    from actors.scorers.frozen_model import FrozenEngine

    return FrozenEngine(config, folder)


class RayWorker:
    """Asks a scorer's actor; see `service.scorers.asking.Worker`."""

    def __init__(self, name: str, is_process: bool) -> None:
        """Store the settings; `is_process`: whether the actor gets one group at a time, and is ended if it does not
        answer."""
        self._name = name
        self._is_process = is_process
        self._life: str | None = None
        """Name of the process that was ready last."""
        self._ended: str | None = None
        """Name of the process that was ended last. Ray may take some time to end it, and would lose a request to it."""

    async def ready(self) -> None:
        """Wait until the actor has started or restarted; the caller sets a timeout."""
        while True:
            try:
                self._life = await self._call("ready")
                if self._ended is None or self._life != self._ended:
                    return
            except ScorerFailed as failed:
                # Ray is restarting the actor, which does not count as a failed attempt of a group.
                if not isinstance(failed.__context__, ray.exceptions.ActorUnavailableError):
                    raise
            await asyncio.sleep(RESTART_PAUSE)

    async def ask(self, row: int, group: bytes) -> bytes:
        """Return the actor's reply."""
        return await self._call("reply", row, group)  # type: ignore[no-any-return]

    def renew(self) -> None:
        """End the process, which Ray then restarts."""
        if self._is_process:
            self._ended = self._life
            with suppress(ValueError):  # there is no actor of that name; the next request will fail
                ray.kill(ray.get_actor(self._name), no_restart=False)

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(ray.get_actor(self._name), method).remote(*arguments)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ScorerFailed):
                raise error.cause from None
            raise ScorerFailed(Failure.START if method == "ready" else Failure.RAISED, in_a_line(error)) from None
        except (ray.exceptions.RayError, ValueError) as error:  # ValueError: no actor of that name
            raise ScorerFailed(Failure.DIED, in_a_line(error)) from None


def actor_names(scorers: Mapping[str, ScorerConfig]) -> dict[str, list[str]]:
    """Return the names of each scorer's actors: one actor for each worker if the scorer runs a user's code, else a
    single actor."""
    return {
        name: [f"scorer-{name}-{i}" for i in range(scorer.workers if scorer.use is not None else 1)]
        for name, scorer in scorers.items()
    }


def workers(scorers: Mapping[str, ScorerConfig]) -> dict[str, list[Worker]]:
    """Return the workers of each scorer; workers of an address or of an engine share one actor."""
    made: dict[str, list[Worker]] = {}
    for name, actors in actor_names(scorers).items():
        settings = scorers[name]
        one = [RayWorker(actor, is_process=settings.use is not None) for actor in actors]
        made[name] = [*one] if settings.use is not None else [*one * settings.workers]
    return made


def place_scorers(
    scorers: Mapping[str, ScorerConfig],
    config_json: str,
    model_folder: Path,
    tasks_file: Path,
    engine_env: Mapping[str, str],
    has_gpu: bool,
) -> dict[str, Any]:
    """Start the actors of all scorers; returns them by name. They use other CPUs and GPUs than ranks and engines.

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


async def all_up(actors: Iterable[Any], settings: Mapping[str, ScorerConfig | RoleConfig], who: str) -> None:
    """Wait until every actor is ready; a scorer that cannot be loaded ends the run before its first step."""
    within = max((each.start_deadline for each in settings.values()), default=0.0)
    await asyncio.gather(*(started(partial(call, actor.ready, who=who, within=within), within) for actor in actors))
