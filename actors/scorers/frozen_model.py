"""Models whose weights never change: a vLLM engine in the process of a teacher, and the Ray actor of a frozen role."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import ray.exceptions

from actors.calls import in_a_line, resolve_actor
from actors.deaths import Supervised
from actors.engine.vllm_arguments import EngineSettings, engine_arguments
from actors.observe.actor_logs import keep_log
from actors.observe.reporting import Reporter
from service.config import Config
from service.config.rollout import RoleConfig
from service.handoff.steps.stop_reason import StopReason
from service.rollout.chat.chat import load_chat
from service.rollout.engine import Sampling
from service.rollout.environment import Message, TrajectoryFailed

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

OF_THE_POLICY = ("worker_extension_cls", "weight_transfer_config", "enable_return_routed_experts")
"""Arguments of vLLM that only the policy's engines get, not an engine with frozen weights."""


class FrozenEngine:
    """A vLLM engine in this process whose weights never change."""

    def __init__(self, config: Config, folder: Path) -> None:
        arguments = engine_arguments(EngineSettings.of(_frozen_settings(config)), folder)
        for name in OF_THE_POLICY:
            arguments.pop(name, None)
        self._arguments = arguments | {"logprobs_mode": "raw_logprobs"}
        self._llm: AsyncLLM | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()

    async def start(self) -> AsyncLLM:
        """Load the model, if it is not loaded yet; returns vLLM's engine."""
        async with self._starting:
            if self._llm is None:
                self._llm = await asyncio.to_thread(_build, self._arguments)
            return self._llm

    async def logprobs(self, token_ids: list[int]) -> Sequence[float | None]:
        """Return the log-probability of each token given the tokens before it, at temperature 1; None for the first
        token."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        final = RequestOutputKind.FINAL_ONLY
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=final)
        found = (await self._output(token_ids, sampling)).prompt_logprobs or ()
        return [None, *(of[token].logprob for token, of in zip(token_ids[1:], found[1:], strict=True))]

    async def sampled(self, prompt_ids: list[int], sampling: Sampling) -> Sequence[int]:
        """Sample the token ids that follow a prompt, with the temperature, limit and end tokens of `sampling`."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        own = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop_token_ids=list(sampling.stop_token_ids),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        token_ids: Sequence[int] = (await self._output(prompt_ids, own)).outputs[0].token_ids
        return token_ids

    async def _output(self, prompt_ids: list[int], sampling: SamplingParams) -> RequestOutput:
        llm = await self.start()
        prompt: Any = {"type": "token", "prompt_token_ids": prompt_ids}
        try:
            return [output async for output in llm.generate(prompt, sampling, f"{next(self._numbers)}")][-1]
        except Exception:  # vLLM's errors have no common class; if its core still runs, they are raised again
            if llm.errored:
                log.exception("the engine core died")
                os._exit(1)  # Ray restarts the actor
            raise


def _frozen_settings(config: Config) -> Config:
    """Return the settings of a frozen engine; rows may have one more token, because vLLM samples a token
    after a teacher's prompt."""
    update: dict[str, Any] = {"quantization": None, "tensor_parallel_size": 1, "engine_options": {}, "stop": ()}
    update |= {"max_generate_length": config.generator.max_generate_length + 1}
    generator = config.generator.model_copy(update=update)
    return config.model_copy(update={"generator": generator, "model": config.model.model_copy(update={"lora": None})})


def _build(arguments: dict[str, Any]) -> AsyncLLM:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


class FrozenActor(Supervised):
    """The model of one role; the caller wraps it as a Ray actor."""

    def __init__(self, config_json: str, role: str, hub: str | None) -> None:
        """Store the settings; `hub`: the metrics hub, if there is one, so that `baton status` shows whether the
        actor is up."""
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
        """Wait until the model is ready; raises the error that kept it from starting."""
        if self._failure is not None:
            raise self._failure
        await self._engine.start()
        if self._reporter is not None:
            self._reporter.start()
            self._reporter = None

    async def answer(self, messages: Sequence[Message], sampling: Sampling) -> str:
        """Return the model's next message in a conversation."""
        await self.ready()  # also after Ray has restarted the actor
        own = replace(sampling, stop_token_ids=self._chat.end_ids)
        prompt: list[int] = self._chat.prompt(messages).tolist()
        return self._chat.text(np.array(await self._engine.sampled(prompt, own), np.int32))


async def ask_role(role: str, messages: Sequence[Message], sampling: Sampling) -> str:
    """Return the next message of a role's model in a conversation.

    Raises:
        ConnectionError: the model's process has died, and Ray starts another one.
        TrajectoryFailed: the model refused the conversation.
    """
    try:
        return str(await ray.get_actor(actor_name(role)).answer.remote([*messages], sampling))
    except ray.exceptions.RayTaskError as error:
        raise TrajectoryFailed(StopReason.ENVIRONMENT_OUTPUT, f"roles.{role}: {in_a_line(error)}") from None
    except (ray.exceptions.RayError, ValueError) as error:  # ValueError: no actor of that name
        raise ConnectionError(in_a_line(error)) from None


def actor_name(role: str) -> str:
    """Return the name of a role's actor."""
    return f"role-{role}"


def place_roles(
    roles: Mapping[str, RoleConfig], config_json: str, engine_env: Mapping[str, str], has_gpu: bool, hub: str | None
) -> dict[str, Any]:
    """Start the actors of the frozen roles that the run serves; returns the actors by name. They use other GPUs than
    the trainer's ranks and the generators' engines."""
    return {
        actor_name(name): ray.remote(FrozenActor)
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
    }
