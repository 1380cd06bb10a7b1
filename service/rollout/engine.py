"""The interface between agent loop and inference engine, and the limits of a trajectory. The engine gets token ids and
returns token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol

import numpy as np

from service.columns import nested_offsets
from service.config.rollout import EnvConfig, GeneratorConfig, RoleConfig
from service.handoff.steps.values import StopReason
from service.handoff.validate import LOGPROB_TOLERANCE
from service.rollout.environment import MAIN
from service.types import MAX_SUPPORT, EvaluationId, Experts, Float32s, Ids, Int32s, Int64s, TrajectoryId, Uint16s

Mode = Literal["append", "rerender", "inline"]
"""How the prompt of the next turn is built (`service.rollout.chat.conversation`)."""
MAX_OBSERVATION_CHARACTERS = 1 << 20
"""Maximum characters of one observation: all texts and names in its messages together. A longer observation fails the
trajectory."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one turn."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a turn and are part of the response."""
    with_supports: bool = True
    """Whether to report the tokens among which each token was drawn, if the sampler truncates (top-k, top-p, min-p)."""

    @staticmethod
    def of(config: GeneratorConfig, stop_token_ids: tuple[int, ...]) -> Sampling:
        """The configured sampling parameters. `max_generate_length` includes one token that is reserved for an appended
        end token."""
        names = [each.name for each in fields(Sampling)]
        same = {name: getattr(config, name) for name in names if hasattr(config, name)}
        return Sampling(max_tokens=config.max_generate_length - 1, stop_token_ids=stop_token_ids, **same)


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """The parts of a run's configuration that are needed to play trajectories."""

    seed: int
    env: EnvConfig
    generator: GeneratorConfig
    roles: Mapping[str, RoleConfig]


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """Limits of a trajectory, and the sampling parameters of its turns."""

    max_turns: int
    max_input_length: int
    """Maximum tokens of a turn's prompt."""
    step_deadline: float
    """Time limit of one call of the environment, in seconds."""
    request_deadline: float
    """Time limit of one turn in the engine, in seconds."""
    sampling: Sampling
    max_observation_characters: int = MAX_OBSERVATION_CHARACTERS
    conversation: Mode = "append"
    roles: Mapping[str, RoleConfig | None] = field(default_factory=lambda: {MAIN: None})
    """The roles that turns may have, with their settings; `main` has no settings."""

    def of_trajectory(self, trajectory: TrajectoryId, temperature: float | None) -> AgentLimits:
        """The limits of one trajectory. `temperature`: the task's temperature; None: the configured one. Turns of an
        evaluation report no supports, because nothing is trained on them."""
        warmth = self.sampling.temperature if temperature is None else temperature
        is_trained = not isinstance(trajectory, EvaluationId)
        return replace(self, sampling=replace(self.sampling, temperature=warmth, with_supports=is_trained))

    @property
    def max_length(self) -> int:
        """Maximum tokens of a turn's prompt and response together; an appended end token counts."""
        return self.max_input_length + self.sampling.max_tokens + 1

    @staticmethod
    def of(settings: PlaySettings, end_ids: tuple[int, ...]) -> AgentLimits:
        """Take the limits and the sampling parameters from the configuration. `end_ids`: the tokens that end a turn."""
        env, generator = settings.env, settings.generator
        return AgentLimits(
            max_turns=env.max_turns,
            max_input_length=generator.max_input_length,
            step_deadline=env.step_deadline,
            request_deadline=generator.request_deadline,
            sampling=Sampling.of(generator, end_ids),
            conversation=generator.conversation,
            roles={MAIN: None, **settings.roles},
        )


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """The tokens that the engine sampled for one turn."""

    token_ids: Int32s
    """[T] the sampled token ids, including the end token if one was sampled."""
    logprobs: Float32s
    """[T] log-probability of each token under the distribution from which it was sampled."""
    versions: Int64s
    """[T] packed `PolicyVersion` of the policy that sampled each token."""
    stop_reason: str
    """Why sampling stopped: `stop`, `length` or `abort`."""
    sampled_end: bool
    """True if the last token is an end token that the policy sampled."""
    routed_experts: Experts | None = None
    """[at most P + T, layers, topk] expert ids of each token, beginning with the first prompt token; None if the engine
    records no experts."""
    support_size: Uint16s | None = None
    """[T] the number of tokens among which the sampler drew each token; None: it drew from the whole vocabulary."""
    support: Ids | None = None
    """[U] for each token in turn: the ids among which it was drawn, in ascending order, without the drawn id."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the turn spent in the engine: in its `queue`, in `prefill`, and in the `pause` for new weights.
    Parts that the engine does not report are missing."""


class Engine(Protocol):
    """An inference engine: gets the token ids of a prompt, and samples the tokens that follow."""

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        """Sample one turn; if this call is cancelled, the request is aborted."""


def validate_generation(answer: Generation, prompt_length: int, max_tokens: int, vocab_size: int) -> str | None:
    """Check an engine's answer before a step is built from it. Returns an error message, or None if the answer is
    valid.

    max_tokens 4    ids [8 9 2]   log-probabilities [-.1 -.4 -.2]   versions [7 7 8]    valid
                    ids [8 9 2]   log-probabilities [-.1 -.4]       versions [7 7 8]    refused

    A log-probability of NaN or minus infinity is valid: the buffer masks the token and counts it in a metric.
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
    if (sizes := answer.support_size) is not None:
        if (largest := int(sizes.max(initial=0))) > MAX_SUPPORT:
            remedy = f"set generator.top_k to at most {MAX_SUPPORT}, or if it is set, too many are equally probable"
            return f"a token that was drawn from {largest} tokens or more: {remedy}"
        n_others = None if answer.support is None else len(answer.support)
        if sizes.shape != (n_tokens,) or n_others != nested_offsets(sizes)[-1]:
            return f"{_shape(sizes)} sizes and {n_others} ids of supports for {n_tokens} tokens"
    if not n_tokens:
        ended = answer.sampled_end or answer.stop_reason == StopReason.LENGTH
        return f"no token, but the end {answer.stop_reason!r}" if ended else None
    return _bad_value(answer, vocab_size)


def _bad_value(answer: Generation, vocab_size: int) -> str | None:
    ids = answer.token_ids if answer.support is None else np.concatenate((answer.token_ids, answer.support))
    low, high = int(ids.min()), int(ids.max())
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
