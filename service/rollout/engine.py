"""The inference engine's interface for the agent loop: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np

from service.config.rollout import GeneratorConfig
from service.handoff.steps.stop_reason import StopReason
from service.handoff.validate import LOGPROB_TOLERANCE
from service.types import Experts, Float32s, Int32s, Int64s


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one turn."""

    max_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a turn and are part of the response."""
    structure: str = ""
    """Constraint on the text of the turn, as the JSON of a structural tag of xgrammar; empty: no constraint."""

    @staticmethod
    def of(config: GeneratorConfig, stop_token_ids: tuple[int, ...]) -> Sampling:
        """The configured sampling parameters; reserves one token of `max_generate_length` for an appended
        end token."""
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
    """Whether the last token is a sampled end token."""
    routed_experts: Experts | None = None
    """[at most P + T, layers, topk] ids of experts, from the first prompt token on; None if the engine records none."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent in the engine's `queue`, in `prefill` and in the `pause` for new weights, as far as reported."""


class StructureRefused(ValueError):
    """An engine cannot enforce `Sampling.structure`."""


class Engine(Protocol):
    """An inference engine, which continues token ids."""

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        """Sample one turn; cancelling the call aborts the request."""


def validate_generation(answer: Generation, prompt_length: int, max_tokens: int, vocab_size: int) -> str | None:
    """What is wrong with an engine's answer, checked before a step is built from it; None if it is valid.

    max_tokens 4    ids [8 9 2]   log-probabilities [-.1 -.4 -.2]   versions [7 7 8]    valid
                    ids [8 9 2]   log-probabilities [-.1 -.4]       versions [7 7 8]    refused

    Single log-probabilities of NaN or minus infinity are valid: the buffer masks and counts such tokens.
    """
    n_tokens = len(answer.token_ids)
    if answer.stop_reason not in (StopReason.STOP, StopReason.LENGTH):
        return f"the turn ended for the reason {answer.stop_reason!r}"
    if n_tokens > max_tokens:
        return f"{n_tokens} tokens, {max_tokens} were asked for"
    for name, column in (("log-probabilities", answer.logprobs), ("versions", answer.versions)):
        if column.shape != (n_tokens,):
            return f"{_shape(column)} {name} for {n_tokens} tokens"
    experts = answer.routed_experts
    if experts is not None and (experts.ndim != 3 or len(experts) > prompt_length + n_tokens or 0 in experts.shape[1:]):
        return f"{_shape(experts)} routed experts for {prompt_length} + {n_tokens} tokens"
    if not n_tokens:
        ended = answer.sampled_end or answer.stop_reason == StopReason.LENGTH
        return f"no token, but the end {answer.stop_reason!r}" if ended else None
    return _bad_value(answer, vocab_size)


def _bad_value(answer: Generation, vocab_size: int) -> str | None:
    low, high = int(answer.token_ids.min()), int(answer.token_ids.max())
    if low < 0 or high >= vocab_size:
        return f"the token {low if low < 0 else high} of a vocabulary of {vocab_size}"
    if answer.versions.min() < 0:
        return "tokens of no policy version"
    largest = np.fmax.reduce(answer.logprobs)  # NaN only where all are NaN
    if largest > LOGPROB_TOLERANCE:
        return f"the log-probability {largest:g}"
    if len(answer.token_ids) > 1 and not np.isfinite(answer.logprobs).any():
        return "no finite log-probability"
    return None


def _shape(column: np.ndarray) -> str:
    return " x ".join(map(str, column.shape))
