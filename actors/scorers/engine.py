"""A teacher's vLLM engine: the log-probabilities of given tokens, which vLLM calls those of a prompt."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.generator.engine_arguments import engine_arguments
from service.config import Config

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

OF_THE_POLICY = ("worker_extension_cls", "weight_transfer_config", "enable_return_routed_experts")
"""Arguments of the policy's engine that a teacher, whose weights never change, has no use for."""


class TeacherEngine:
    """One frozen engine in this process."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._arguments = teacher_arguments(config, folder)
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

        await self.start()
        if self._llm is None:
            raise RuntimeError("the engine is not started")
        sampling = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt: Any = {"type": "token", "prompt_token_ids": token_ids}
        outputs = self._llm.generate(prompt, sampling, f"teach-{next(self._numbers)}")
        output = [output async for output in outputs][-1]
        found = output.prompt_logprobs or ()
        return [None, *(of[token].logprob for token, of in zip(token_ids[1:], found[1:], strict=True))]


def teacher_arguments(config: Config, folder: Path) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`: those of the policy's engines, of which one token is left over.

    vLLM samples a token after each prompt.
    """
    longer = config.generator.max_generate_length + 1
    generator = {"max_generate_length": longer, "quantization": None, "tensor_parallel_size": 1, "stop": ()}
    update = {
        "generator": config.generator.model_copy(update=generator),
        "model": config.model.model_copy(update={"lora": None}),
    }
    arguments = engine_arguments(config.model_copy(update=update), folder)
    for name in OF_THE_POLICY:
        arguments.pop(name, None)
    return arguments | {"logprobs_mode": "raw_logprobs"}


def _build(arguments: dict[str, Any]) -> AsyncLLM:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
