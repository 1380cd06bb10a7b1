"""The agent loop: plays one trajectory by exchanging token ids with the engine, and sends one step per turn to a sink.

    reset -> prompt -> [length?] -> generate -> step of the environment -> append the step -> next prompt -> ...

Each role has its own conversation, and the environment chooses the role of the next turn. The record that ends the
trajectory, with the reason of its end, is sent last. A turn that is not finished gives no step. `[length?]`: a prompt
that is too long ends the trajectory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from service.errors import in_one_line
from service.handoff.steps.values import NEEDED, StopReason
from service.rollout.chat.chat import Chat
from service.rollout.chat.conversation import Conversation, generation_of, without_loss
from service.rollout.chat.frozen import FrozenModels
from service.rollout.chat.special_tokens import MessagesRefused
from service.rollout.engine import Engine, Generation, validate_generation
from service.rollout.env_guard import EnvGuard
from service.rollout.environment import MAIN, StepResult, Task, TrajectoryFailed
from service.rollout.episode import Episode
from service.rollout.limits import AgentLimits
from service.rollout.step_sinks import StepSink
from service.types import Int32s, TrajectoryEnd, TrajectoryId

log = logging.getLogger(__name__)


class TrajectoryResult(NamedTuple):
    """The result of playing one trajectory, apart from its steps."""

    end: TrajectoryEnd
    info: Mapping[str, float]
    """The environment's `info`, each number summed over the steps."""
    failure: str
    """The reason why the trajectory failed; empty if it did not fail."""


async def run_trajectory(
    trajectory: TrajectoryId,
    task: Task,
    environment: EnvGuard,
    engine: Engine,
    chat: Chat,
    limits: AgentLimits,
    seed: int,
    sink: StepSink,
    frozen: FrozenModels | None = None,
) -> TrajectoryResult:
    """Play one trajectory; `sink` gets a step after each finished turn, then the record that ends the trajectory.

    `frozen`: the models that play frozen roles; None if there are no frozen roles.
    """
    if task.temperature is not None:
        limits = replace(limits, sampling=replace(limits.sampling, temperature=task.temperature))
    episode, info, failure = Episode(trajectory, task, limits, sink), Counter[str](), ""
    sides = {role: Conversation(limits.conversation, chat) for role in limits.roles}
    try:
        result = StepResult(await environment.reset(task, seed), 0.0, False)
        while not result.done:
            role, side = result.role, sides[result.role]
            tools = task.tools if role == MAIN else ()
            prompt = side.prompt(result.messages, result.history, tools)
            if (prompt_ids := episode.next_prompt(prompt, role)) is None:
                break
            if is_frozen := frozen is not None and role in frozen:
                text = await frozen.answer(role, side.messages, limits.sampling, limits.request_deadline)
                generation = generation_of(text, chat, limits.sampling.max_tokens)
            else:
                request_id = f"{trajectory}/turn={episode.n_steps}"
                generation = await generate_turn(engine, prompt_ids, limits, chat.vocab_size, request_id)
                text = _text_until_stop(chat, limits.sampling.stop, generation.token_ids)
            result = await environment.step(text)
            response = side.close(text, generation, episode.is_last(result.done))
            response = without_loss(response) if is_frozen else response
            info.update(result.info)
            episode.finish_turn(response, generation, result.reward, role)
            if wrong := episode.give(result.rewards):
                why = f"rewards[{wrong[0]!r}]: the role has had no turn, or its sum is not {NEEDED}"
                raise TrajectoryFailed(StopReason.ENVIRONMENT_REWARD, why)
    except (TrajectoryFailed, MessagesRefused) as error:
        refused = TrajectoryFailed(StopReason.ENVIRONMENT_OUTPUT, str(error))
        failed = error if isinstance(error, TrajectoryFailed) else refused
        log.warning("%s of prompt %s is lost: %s", trajectory, in_one_line(task.uid), failed)
        episode.stop_reason, failure = failed.reason, str(failed)
    finally:
        await environment.close(trajectory)
    return TrajectoryResult(episode.finish(failure), info, failure)


async def generate_turn(
    engine: Engine, prompt_ids: Int32s, limits: AgentLimits, vocab_size: int, request_id: str
) -> Generation:
    """Sample one turn of the policy from the engine; errors that the engine raises are passed on.

    Raises:
        TrajectoryFailed: the engine aborted the turn, took too long, or returned malformed columns.
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


def _text_until_stop(chat: Chat, stop: tuple[str, ...], token_ids: Int32s) -> str:
    """The text for the environment, up to and including the first stop string; the rest of the last token's text is
    dropped."""
    text = chat.text(token_ids)
    ends = [found + len(s) for s in stop if (found := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text
