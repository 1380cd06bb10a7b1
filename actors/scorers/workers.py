"""Calls the actors of scorers from the buffer's process, which itself imports no code of scorers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
import ray.exceptions

from actors.calls import in_a_line
from service.config.rollout import ScorerConfig
from service.handoff.scoring import Scoring
from service.scorers.asking import Asking
from service.scorers.reply import Failure, ScorerFailed

RESTART_PAUSE = 0.2
"""Seconds between two checks of an actor that Ray restarts."""


class RayWorker:
    """A worker that asks the Ray actor of a scorer; implements `service.scorers.asking.Worker`."""

    def __init__(self, name: str, is_process: bool) -> None:
        """Store the settings. `name`: the actor's name. `is_process`: whether the actor serves only this worker; then
        its process is ended if it does not answer."""
        self._name = name
        self._is_process = is_process
        self._life: str | None = None
        """Name of the process that was ready last."""
        self._ended: str | None = None
        """Name of the process that was ended last. Ray may take some time to end it; a request to it would be lost."""

    async def ready(self) -> None:
        """Wait until the actor has started or restarted; the caller sets a timeout."""
        while True:
            try:
                self._life = await self._call("ready")
                if self._ended is None or self._life != self._ended:
                    return
            except ScorerFailed as failed:
                # Ray is restarting the actor. This is no failed attempt of a group.
                if not isinstance(failed.__context__, ray.exceptions.ActorUnavailableError):
                    raise
            await asyncio.sleep(RESTART_PAUSE)

    async def ask(self, row: int, group: bytes) -> bytes:
        """Return the actor's reply about a group; see `Scorer.reply`."""
        return await self._call("reply", row, group)  # type: ignore[no-any-return]

    def renew(self) -> None:
        """End the actor's process, if `is_process`; Ray then starts the actor again."""
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
    """Return the names of each scorer's actors."""
    return {name: [f"scorer-{name}-{i}" for i in range(scorer.n_processes)] for name, scorer in scorers.items()}


def asking(scorers: Mapping[str, ScorerConfig], scoring: Scoring, settled: Callable[[], Awaitable[None]]) -> Asking:
    """Return the `Asking` that sends waiting groups to the scorers' actors; for `settled` see `Asking`. Each worker of
    a user's code has its own actor. The workers of a teacher at an address or in an engine share one actor."""
    workers: dict[str, list[RayWorker]] = {}
    for name, actors in actor_names(scorers).items():
        of = scorers[name]
        own = [RayWorker(actor, is_process=of.use is not None) for actor in actors]
        workers[name] = own * (of.workers // len(own))
    return Asking(scorers, scoring, workers, settled)
