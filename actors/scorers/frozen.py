"""The Ray actor of a frozen role whose model the run serves, and how a generator asks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.exceptions

from actors.calls import in_a_line, resolve_actor
from actors.observe.actor_logs import keep_log
from actors.observe.reporting import Reporter
from actors.scorers.engine import FrozenEngine
from service.config import Config
from service.config.rollout import RoleConfig
from service.handoff.steps.stop_reason import StopReason
from service.rollout.chat.chat import load_chat
from service.rollout.engine import Sampling
from service.rollout.environment import Message, TrajectoryFailed


class FrozenActor:
    """The model of one role; the caller wraps it as a Ray actor."""

    def __init__(self, config_json: str, role: str, hub: str | None) -> None:
        """`hub`: the metrics hub, if there is one, by which `baton status` shows whether the actor is up."""
        keep_log(f"role-{role}")
        config = Config.model_validate_json(config_json)
        self._failure: Exception | None = None
        self._reporter = None if hub is None else Reporter("role", f"role-{role}", config, resolve_actor(hub))
        try:
            folder = Path(config.roles[role].model or "")
            self._chat = load_chat(folder, config.generator)
            self._engine = FrozenEngine(config, folder)
        except Exception as error:  # noqa: BLE001 - raised by `ready`
            # Ray would restart an actor whose constructor raises again and again.
            self._failure = error

    async def ready(self) -> None:
        """Return when the model can be asked; raises the error that kept it from starting."""
        if self._failure is not None:
            raise self._failure
        await self._engine.start()
        if self._reporter is not None:
            self._reporter.start()
            self._reporter = None

    async def answer(self, messages: Sequence[Message], sampling: Sampling) -> str:
        """What the model says next in a conversation."""
        await self.ready()  # also after Ray has started it anew
        own = replace(sampling, stop_token_ids=self._chat.end_ids)
        prompt: list[int] = self._chat.prompt(messages).tolist()
        return self._chat.text(np.array(await self._engine.sampled(prompt, own), np.int32))


async def ask_role(role: str, messages: Sequence[Message], sampling: Sampling) -> str:
    """What a role's model says next in a conversation.

    Raises:
        ConnectionError: its process has died, and Ray starts another one.
        TrajectoryFailed: the model did not take the conversation.
    """
    try:
        return str(await ray.get_actor(actor_name(role)).answer.remote([*messages], sampling))
    except ray.exceptions.RayTaskError as error:
        raise TrajectoryFailed(StopReason.ENVIRONMENT_OUTPUT, f"roles.{role}: {in_a_line(error)}") from None
    except (ray.exceptions.RayError, ValueError) as error:  # ValueError: no actor of that name
        raise ConnectionError(in_a_line(error)) from None


def actor_name(role: str) -> str:
    """The name of a role's actor."""
    return f"role-{role}"


def place_roles(
    roles: Mapping[str, RoleConfig], config_json: str, engine_env: Mapping[str, str], has_gpu: bool, hub: str | None
) -> tuple[Any, ...]:
    """Start the actors of frozen roles that the run serves; they have GPUs beside those of ranks and engines."""
    return tuple(
        ray.remote(FrozenActor)
        .options(
            name=actor_name(name),
            max_restarts=-1,
            max_concurrency=1000,
            num_cpus=0,
            num_gpus=role.gpus if has_gpu else 0,
            runtime_env={"env_vars": {**engine_env}},
        )
        .remote(config_json, name, hub)
        for name, role in roles.items()
    )
