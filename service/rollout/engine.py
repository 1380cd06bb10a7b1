"""The inference engine as the agent loop uses it: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

from service.config.rollout import GeneratorConfig
from service.types import Float32s, Int16s, Int32s, Int64s


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one turn."""

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
    """Token ids that end a turn and are part of the response."""

    @staticmethod
    def of(config: GeneratorConfig, stop_token_ids: tuple[int, ...]) -> Sampling:
        """The configured parameters; `max_generate_length` leaves one token for an appended end."""
        names = [each.name for each in fields(Sampling)]
        same = {name: getattr(config, name) for name in names if hasattr(config, name)}
        return Sampling(max_tokens=config.max_generate_length - 1, stop_token_ids=stop_token_ids, **same)


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """The tokens that the engine sampled for one turn."""

    token_ids: Int32s
    """[T] exactly the sampled ids, including a sampled end token."""
    logprobs: Float32s
    """[T] log-probabilities under the sampling distribution."""
    versions: Int64s
    """[T] packed `PolicyVersion` that sampled each token."""
    stop_reason: str
    """`stop`, `length` or `abort`."""
    sampled_end: bool
    """True where the last token is a sampled end token."""
    routed_experts: Int16s | None = None
    """[at most P + T, layers, topk] from the first prompt token on; None where the engine records none."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds in the engine's `queue`, of `prefill`, and of the `pause` for new weights, as far as it reports them."""


class Engine(Protocol):
    """Continues token ids."""

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        """Sample one turn; cancelling the call aborts the request."""
