"""Calls to the environment and the engine, with deadlines and checks: a failure ends only its own trajectory."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from service.handoff.steps.stop_reason import StopReason
from service.rollout.chat.special_tokens import MessagesRefused
from service.rollout.engine import Engine, Generation
from service.rollout.environment import Environment, Message, OversizedOutput, StepResult
from service.rollout.limits import AgentLimits
from service.rollout.traceback import describe_error
from service.rollout.validate_generation import validate_generation
from service.types import Int32s, TrajectoryId

log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

MESSAGE_KEYS = ("role", "content")


class TrajectoryFailed(Exception):
    """The trajectory is lost; all others go on."""

    def __init__(self, reason: StopReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


async def generate_turn(
    engine: Engine, prompt_ids: Int32s, limits: AgentLimits, vocab_size: int, request_id: str
) -> Generation:
    """Sample one turn of the policy; the engine's own errors propagate.

    Raises:
        TrajectoryFailed: the turn was aborted, took too long, or its columns are malformed.
    """
    try:
        async with asyncio.timeout(limits.request_deadline) as scope:
            generation = await engine.generate(prompt_ids, limits.sampling, request_id)
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise TrajectoryFailed(StopReason.ENGINE_TIMEOUT, f"no turn after {limits.request_deadline:g} s") from error
    if generation.stop_reason == StopReason.ABORT:
        raise TrajectoryFailed(StopReason.ABORT, "the engine aborted the turn")
    problem = validate_generation(generation, len(prompt_ids), limits.sampling.max_tokens, vocab_size)
    if problem is not None:
        raise TrajectoryFailed(StopReason.ENGINE_OUTPUT, f"the engine answered {request_id} with {problem}")
    return generation


async def ask_environment(limits: AgentLimits, method: Callable[P, Awaitable[T]], *args: P.args, **more: P.kwargs) -> T:
    """The answer of a method of the environment.

    Raises:
        TrajectoryFailed: the environment raised, or did not answer within `limits.step_deadline`.
    """
    try:
        async with asyncio.timeout(limits.step_deadline) as scope:
            return await method(*args, **more)
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is None or current.cancelling():
            raise
        # Not the trajectory was cancelled, but something inside the environment.
        raise TrajectoryFailed(StopReason.ENVIRONMENT_ERROR, "what it waited for was cancelled") from error
    except OversizedOutput as error:
        raise TrajectoryFailed(StopReason.ENVIRONMENT_OUTPUT, str(error)) from error
    except BaseException as error:
        # The environment may execute text of the policy, so any exception is possible, SystemExit included.
        if isinstance(error, TimeoutError) and scope.expired():
            late = f"no answer after {limits.step_deadline:g} s"
            raise TrajectoryFailed(StopReason.ENVIRONMENT_TIMEOUT, late) from error
        raise TrajectoryFailed(StopReason.ENVIRONMENT_ERROR, describe_error(error)) from error


async def close_environment(environment: Environment, limits: AgentLimits, trajectory: TrajectoryId) -> None:
    """Close the environment; a failure is only logged, because the trajectory is over."""
    try:
        await ask_environment(limits, environment.close)
    except TrajectoryFailed as failed:
        log.warning("%s: the environment did not close: %s", trajectory, failed)


def checked_result(result: StepResult, limits: AgentLimits) -> StepResult:
    """The result with its values converted to plain Python types.

    Raises:
        TrajectoryFailed: it is no `StepResult`, its reward is not finite, or another field is malformed or too large.
    """
    if not isinstance(result, StepResult):
        raise TrajectoryFailed(StopReason.ENVIRONMENT_ERROR, f"step returned a {type(result).__name__}, no StepResult")
    if not isinstance(result.reward, Real) or not _is_finite(result.reward):
        raise TrajectoryFailed(StopReason.ENVIRONMENT_REWARD, f"the reward is {_shown(result.reward)}")
    if not isinstance(result.done, bool | np.bool_ | int):
        raise TrajectoryFailed(StopReason.ENVIRONMENT_ERROR, f"done is true or false, not {_shown(result.done)}")
    messages = () if result.done else checked_messages(result.messages, limits)
    done, info = bool(result.done), _checked_info(result.info)
    return result._replace(messages=messages, reward=float(result.reward), done=done, info=info)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:  # noqa: BLE001 - an integer of too many digits, or any error in a user's `__repr__`
        return f"a {type(value).__name__}"


def _checked_info(info: Any) -> dict[str, float]:
    info = {} if info is None else info
    if not isinstance(info, Mapping) or not all(isinstance(value, Real | np.bool_) for value in info.values()):
        raise TrajectoryFailed(StopReason.ENVIRONMENT_ERROR, f"info holds numbers by name, not {_shown(info)}")
    return {str(name): float(value) if _is_finite(value) else math.nan for name, value in info.items()}


def checked_messages(messages: Sequence[Message], limits: AgentLimits) -> Sequence[Message]:
    """Copies of the messages, because the environment may reuse its own objects.

    Raises:
        TrajectoryFailed: a message is malformed, or all together exceed `limits.max_observation_characters`.
    """
    if not isinstance(messages, Sequence):
        raise TrajectoryFailed(StopReason.ENVIRONMENT_OUTPUT, f"{type(messages).__name__} is no list of messages")
    size = 0
    for message in messages:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in MESSAGE_KEYS):
            raise TrajectoryFailed(StopReason.ENVIRONMENT_OUTPUT, "a message needs a role and a text as content")
        size += len(message["content"])
    if size > limits.max_observation_characters:
        allowed = f"{limits.max_observation_characters} are allowed"
        raise TrajectoryFailed(StopReason.ENVIRONMENT_OUTPUT, f"{size} characters at once; {allowed}")
    return [cast(Message, dict(message)) for message in messages]


def render(make_prompt: Callable[[], T]) -> T:
    """Call `make_prompt`, which renders an environment's messages with the chat template.

    Raises:
        TrajectoryFailed: the chat template refuses the messages.
    """
    try:
        return make_prompt()
    except MessagesRefused as error:
        raise TrajectoryFailed(StopReason.ENVIRONMENT_OUTPUT, str(error)) from error
