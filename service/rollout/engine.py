"""What the agent loop needs of an inference engine: token ids in, token ids out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from service.config.rollout import GeneratorConfig
from service.types import Float32s, Int16s, Int32s, Int64s


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one turn is sampled."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a turn; they are part of the response."""

    @staticmethod
    def of(config: GeneratorConfig, stop_token_ids: tuple[int, ...]) -> Sampling:
        """The configured sampling; one token of `max_generate_length` stays free for an appended end."""
        return Sampling(
            max_tokens=config.max_generate_length - 1,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
            presence_penalty=config.presence_penalty,
            frequency_penalty=config.frequency_penalty,
            stop=config.stop,
            stop_token_ids=stop_token_ids,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What the engine sampled for one turn."""

    token_ids: Int32s
    """[T] exactly the sampled ids, the end-of-sequence token included where it was sampled."""
    logprobs: Float32s
    """[T] of the sampling distribution."""
    versions: Int64s
    """[T] packed `PolicyVersion` that sampled each token."""
    stop_reason: str
    """`stop`, `length` or `abort`."""
    sampled_end: bool
    """The last token is a sampled end of the turn."""
    routed_experts: Int16s | None = None
    """[at most P + T, layers, topk] from the first prompt token on; None when nobody recorded them."""


class Engine(Protocol):
    """An engine that continues token ids."""

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        """Sample one turn; cancelling the call aborts the request."""
