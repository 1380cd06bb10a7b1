"""The agent loop: one trajectory, token in, token out, a step per turn.

Turn 0:  prompt                       -> response        step 0 carries the whole prompt
Turn 1:  prompt + response + delta    -> response        step 1 carries the delta and extends step 0
...
Ends:    the record that closes the trajectory, with its reason; a turn that was not finished emits no step.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from numbers import Real
from typing import TypeVar

import numpy as np
from jinja2 import TemplateError

from service.config.tree import Config
from service.errors import UserError
from service.handoff.digest import digest
from service.rollout.chat import Chat
from service.rollout.engine import Engine, Generation, Sampling
from service.rollout.environment import Environment, Message, StepResult, Task
from service.types import (
    NO_VERSION,
    ROUTE_NATIVELY,
    Extension,
    Int16s,
    Int32s,
    Step,
    TrajectoryEnd,
    TrajectoryId,
)

log = logging.getLogger(__name__)

T = TypeVar("T")


class StopReason(StrEnum):
    """Why a trajectory ended."""

    STOP = "stop"
    """The environment said so."""
    LENGTH = "length"
    """The next prompt would exceed `max_input_length`."""
    MAX_TURNS = "max_turns"
    ABORT = "abort"
    """The engine gave the turn up."""
    ENGINE_TIMEOUT = "engine_timeout"
    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    ENVIRONMENT_REWARD = "environment_reward"
    """The reward was not a finite number."""
    ENVIRONMENT_OUTPUT = "environment_output"
    """The messages were malformed or too large."""


FAILURES = frozenset(StopReason) - {StopReason.STOP, StopReason.LENGTH, StopReason.MAX_TURNS}
"""Reasons that say nothing about the policy: the trajectory is lost."""


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """What a trajectory may use, and how its turns are sampled."""

    max_turns: int
    max_input_length: int
    """Tokens of a turn's prompt."""
    step_deadline: float
    """Seconds of one call of the environment."""
    request_deadline: float
    """Seconds of one turn in the engine."""
    sampling: Sampling
    max_observation_characters: int = 1 << 20
    """Characters of one observation."""

    @staticmethod
    def of(config: Config, chat: Chat) -> AgentLimits:
        """The configured limits."""
        if config.generator.max_generate_length < 2:
            raise UserError("generator.max_generate_length: 1 leaves no room for an appended end; give at least 2")
        return AgentLimits(
            max_turns=config.env.max_turns,
            max_input_length=config.generator.max_input_length,
            step_deadline=config.env.step_deadline,
            request_deadline=config.generator.request_deadline,
            sampling=Sampling.of(config.generator, chat.end_ids),
        )


class TrajectoryFailed(Exception):
    """The trajectory is lost; nothing else is."""

    def __init__(self, reason: StopReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


async def run_trajectory(
    trajectory: TrajectoryId,
    task: Task,
    environment: Environment,
    engine: Engine,
    chat: Chat,
    limits: AgentLimits,
    seed: int,
) -> AsyncIterator[Step | TrajectoryEnd]:
    """Play one episode: each finished turn as a `Step`, at last the `TrajectoryEnd`."""
    episode = _Episode(trajectory, task, chat, limits)
    try:
        messages = await _ask(environment.reset(task, seed), limits)
        delta = _token_ids(partial(chat.prompt, _checked_messages(messages, limits)))
        while (prompt_ids := episode.next_prompt(delta)) is not None:
            generation = await _generate(engine, prompt_ids, limits, f"{trajectory}/turn={episode.n_steps}")
            response_ids = _with_end(generation, chat.end_id)
            text = _cut_at_stop(chat.text(generation.token_ids), limits.sampling.stop)
            result = _checked(await _ask(environment.step(text), limits), limits)
            yield episode.step(delta, response_ids, generation, float(result.reward))
            if result.done:
                break
            delta = _token_ids(partial(chat.delta, result.messages, int(response_ids[-1])))
    except TrajectoryFailed as failed:
        log.warning("%s of prompt %s is lost: %s", trajectory, task.uid, failed)
        episode.stop_reason = failed.reason
    finally:
        await _close(environment, limits, trajectory)
    yield episode.end()


class _Episode:
    """The token history of one trajectory and what was emitted of it."""

    def __init__(self, trajectory: TrajectoryId, task: Task, chat: Chat, limits: AgentLimits) -> None:
        self._trajectory = trajectory
        self._uid = task.uid
        self._limits = limits
        self._history = np.empty(limits.max_input_length + limits.sampling.max_tokens + 1, dtype=np.int32)
        self._length = 0
        self._extends: Extension | None = None
        self._reward = 0.0
        self.n_steps = 0
        self.stop_reason = StopReason.STOP

    def next_prompt(self, delta: Int32s) -> Int32s | None:
        """The ids of this turn's prompt, or None where the trajectory ends before it."""
        if self.n_steps == self._limits.max_turns:
            self.stop_reason = StopReason.MAX_TURNS
            return None
        if self._length + len(delta) > self._limits.max_input_length:
            self.stop_reason = StopReason.LENGTH
            return None
        self._append(delta)
        return self._history[: self._length]

    def step(self, delta: Int32s, response_ids: Int32s, generation: Generation, reward: float) -> Step:
        """The finished turn, and the reference by which the next one extends it."""
        self._append(response_ids)
        n_sampled, n_tokens = len(generation.token_ids), len(response_ids)
        loss_mask = np.ones(n_tokens, dtype=np.bool_)
        loss_mask[n_sampled:] = False
        carried = len(delta) + n_tokens
        step = Step(
            trajectory=self._trajectory,
            prompt_uid=self._uid,
            index=self.n_steps,
            prompt_ids=delta,
            response_ids=response_ids,
            logprobs=None if generation.logprobs is None else _padded(generation.logprobs, n_tokens, 0),
            loss_mask=loss_mask,
            versions=_padded(generation.versions, n_tokens, NO_VERSION),
            temperature=self._limits.sampling.temperature,
            reward=reward,
            stop_reason=generation.stop_reason,
            extends=self._extends,
            routed_experts=_experts_of(generation.routed_experts, self._length, carried),
        )
        self._extends = Extension(self.n_steps, self._length, digest(self._history[: self._length]))
        self._reward = reward
        self.n_steps += 1
        return step

    def end(self) -> TrajectoryEnd:
        """The record that closes the trajectory."""
        return TrajectoryEnd(self._trajectory, self._uid, self.n_steps, str(self.stop_reason), self._reward)

    def _append(self, token_ids: Int32s) -> None:
        stop = self._length + len(token_ids)
        self._history[self._length : stop] = token_ids
        self._length = stop


def _with_end(generation: Generation, end_id: int) -> Int32s:
    """The response; an end is appended where the policy stopped without one, so that every response is closed."""
    if generation.sampled_end:
        return generation.token_ids
    return np.append(generation.token_ids, np.int32(end_id))


def _padded(values: np.ndarray, length: int, fill: int) -> np.ndarray:
    if len(values) == length:
        return values
    return np.concatenate([values, np.full(length - len(values), fill, dtype=values.dtype)])


def _experts_of(experts: Int16s | None, total: int, carried: int) -> Int16s | None:
    """The last `carried` of `total` tokens' experts; an engine records none for the last token it sampled."""
    if experts is None:
        return None
    recorded = experts[total - carried : total]
    aligned = np.full((carried, *experts.shape[1:]), ROUTE_NATIVELY, dtype=np.int16)
    aligned[: len(recorded)] = recorded
    return aligned


def _cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text up to and including the first stop string; token ids may run past it."""
    ends = [found + len(s) for s in stop if (found := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text


async def _generate(engine: Engine, prompt_ids: Int32s, limits: AgentLimits, request_id: str) -> Generation:
    try:
        async with asyncio.timeout(limits.request_deadline) as scope:
            generation = await engine.generate(prompt_ids, limits.sampling, request_id)
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise TrajectoryFailed(StopReason.ENGINE_TIMEOUT, f"no turn after {limits.request_deadline:g} s") from error
    if generation.stop_reason == StopReason.ABORT:
        raise TrajectoryFailed(StopReason.ABORT, "the engine aborted the turn")
    return generation


async def _ask(answer: Awaitable[T], limits: AgentLimits) -> T:
    """What the environment answers within its deadline; whatever it raises instead costs this trajectory only."""
    try:
        async with asyncio.timeout(limits.step_deadline) as scope:
            return await answer
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and scope.expired():
            raise TrajectoryFailed(
                StopReason.ENVIRONMENT_TIMEOUT, f"no answer after {limits.step_deadline:g} s"
            ) from error
        raise TrajectoryFailed(StopReason.ENVIRONMENT_ERROR, f"{type(error).__name__}: {error}") from error


async def _close(environment: Environment, limits: AgentLimits, trajectory: TrajectoryId) -> None:
    try:
        await _ask(environment.close(), limits)
    except TrajectoryFailed as failed:
        log.warning("%s: the environment did not close: %s", trajectory, failed)


def _checked(result: StepResult, limits: AgentLimits) -> StepResult:
    if not isinstance(result, StepResult):
        raise TrajectoryFailed(StopReason.ENVIRONMENT_ERROR, f"step returned a {type(result).__name__}, no StepResult")
    if not isinstance(result.reward, Real) or not math.isfinite(result.reward):
        raise TrajectoryFailed(StopReason.ENVIRONMENT_REWARD, f"the reward is {result.reward!r}")
    if not result.done:
        _checked_messages(result.messages, limits)
    return result


def _checked_messages(messages: Sequence[Message], limits: AgentLimits) -> Sequence[Message]:
    if not isinstance(messages, Sequence):
        raise TrajectoryFailed(StopReason.ENVIRONMENT_OUTPUT, f"{type(messages).__name__} is no list of messages")
    size = 0
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise TrajectoryFailed(StopReason.ENVIRONMENT_OUTPUT, "a message needs a role and a text as content")
        size += len(message["content"])
    if size > limits.max_observation_characters:
        raise TrajectoryFailed(
            StopReason.ENVIRONMENT_OUTPUT, f"{size} characters at once; {limits.max_observation_characters} are allowed"
        )
    return messages


def _token_ids(make: Callable[[], Int32s]) -> Int32s:
    """The chat's token ids; a template refuses some orders of roles, and then the environment chose a wrong one."""
    try:
        return make()
    except TemplateError as error:
        raise TrajectoryFailed(StopReason.ENVIRONMENT_OUTPUT, f"the chat template refuses: {error}") from error
