"""A vLLM engine whose weights never change, in the process of a teacher."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.engine.vllm_arguments import EngineSettings, engine_arguments
from actors.engine.vllm_engine import build
from service.config import Config

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

OF_THE_POLICY = ("worker_extension_cls", "weight_transfer_config", "enable_return_routed_experts")
"""Arguments of vLLM that only the policy's engines get, not the engine of a teacher."""


class TeacherEngine:
    """A vLLM engine in this process whose weights never change."""

    def __init__(self, config: Config, folder: Path) -> None:
        arguments = engine_arguments(EngineSettings.of(_teacher_settings(config)), folder)
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
                self._llm, _ = await asyncio.to_thread(build, self._arguments)
            return self._llm

    async def logprobs(self, token_ids: list[int]) -> Sequence[float | None]:
        """Return the log-probability of each token, given the tokens before it, at temperature 1; None for the first
        token."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        final = RequestOutputKind.FINAL_ONLY
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=final)
        found = (await self._output(token_ids, sampling)).prompt_logprobs or ()
        return [None, *(of[token].logprob for token, of in zip(token_ids[1:], found[1:], strict=True))]

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


def _teacher_settings(config: Config) -> Config:
    """Return the settings of a teacher's engine. They allow rows one more token, because vLLM samples a token after a
    teacher's prompt."""
    update: dict[str, Any] = {"quantization": None, "tensor_parallel_size": 1, "engine_options": {}, "stop": ()}
    update |= {"max_generate_length": config.generator.max_generate_length + 1}
    generator = config.generator.model_copy(update=update)
    return config.model_copy(update={"generator": generator, "model": config.model.model_copy(update={"lora": None})})
