"""A vLLM engine whose weights never change: a teacher, or the model of a frozen role."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.engine.vllm_arguments import EngineSettings, engine_arguments
from service.config import Config
from service.rollout.engine import Sampling

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

OF_THE_POLICY = ("worker_extension_cls", "weight_transfer_config", "enable_return_routed_experts")
"""Arguments of the policy's engine that one whose weights never change has no use for."""


class FrozenEngine:
    """One frozen engine in this process."""

    def __init__(self, config: Config, folder: Path) -> None:
        arguments = engine_arguments(EngineSettings.of(_frozen_settings(config)), folder)
        for name in OF_THE_POLICY:
            arguments.pop(name, None)
        self._arguments = arguments | {"logprobs_mode": "raw_logprobs"}
        self._llm: AsyncLLM | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Load the model, if that has not been done."""
        async with self._starting:
            if self._llm is None:
                self._llm = await asyncio.to_thread(_build, self._arguments)

    async def logprobs(self, token_ids: list[int]) -> Sequence[float | None]:
        """The log-probability of each token given those before it, at temperature 1; None of the first."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        final = RequestOutputKind.FINAL_ONLY
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=final)
        found = (await self._output(token_ids, sampling)).prompt_logprobs or ()
        return [None, *(of[token].logprob for token, of in zip(token_ids[1:], found[1:], strict=True))]

    async def sampled(self, prompt_ids: list[int], sampling: Sampling) -> Sequence[int]:
        """Token ids that follow a prompt, at the temperature and with the limit and the ends of `sampling`."""
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
        await self.start()
        if self._llm is None:
            raise RuntimeError("the engine is not started")
        prompt: Any = {"type": "token", "prompt_token_ids": prompt_ids}
        try:
            return [output async for output in self._llm.generate(prompt, sampling, f"{next(self._numbers)}")][-1]
        except Exception:  # vLLM's errors have no class in common; where its core lives on, they are raised again
            if self._llm.errored:
                log.exception("the engine core died")
                os._exit(1)  # Ray starts the actor anew
            raise


def _frozen_settings(config: Config) -> Config:
    """Settings of a frozen engine: rows have one token more, because vLLM samples one after a teacher's prompt."""
    longer = config.generator.max_generate_length + 1
    generator = {"max_generate_length": longer, "quantization": None, "tensor_parallel_size": 1, "stop": ()}
    update = {
        "generator": config.generator.model_copy(update=generator),
        "model": config.model.model_copy(update={"lora": None}),
    }
    return config.model_copy(update=update)


def _build(arguments: dict[str, Any]) -> AsyncLLM:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
