"""The agent loop: plays one trajectory, token ids in and token ids out, and appends one step per turn.

    reset -> prompt -> [length?] -> generate -> step of the environment -> append the step -> next prompt -> ...

The trajectory's end with its reason comes last. An unfinished turn appends no step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from service.handoff.steps.builder import StepSink
from service.handoff.steps.stop_reason import StopReason
from service.rollout.chat.chat import Chat
from service.rollout.chat.conversation import conversation
from service.rollout.engine import Engine
from service.rollout.env_guard import (
    TrajectoryFailed,
    ask_environment,
    checked_messages,
    checked_result,
    close_environment,
    generate_turn,
    render,
)
from service.rollout.environment import Environment, Task
from service.rollout.episode import Episode
from service.rollout.limits import AgentLimits
from service.rollout.traceback import describe_error
from service.types import TrajectoryEnd, TrajectoryId

log = logging.getLogger(__name__)


class Played(NamedTuple):
    """The result of one trajectory, beside its steps."""

    end: TrajectoryEnd
    info: Mapping[str, float]
    """The environment's `info`, summed over the steps."""
    failure: str
    """Why the trajectory is lost; empty where it is not."""


async def run_trajectory(
    trajectory: TrajectoryId,
    task: Task,
    environment: Environment,
    engine: Engine,
    chat: Chat,
    limits: AgentLimits,
    seed: int,
    sink: StepSink,
) -> Played:
    """Play one episode; `sink` gets a step for each finished turn, then the trajectory's end."""
    if task.temperature is not None:
        limits = replace(limits, sampling=replace(limits.sampling, temperature=task.temperature))
    episode, info, failure = Episode(trajectory, task, limits, sink), Counter[str](), ""
    turns = conversation(limits.conversation, chat)
    try:
        messages = checked_messages(await ask_environment(limits, environment.reset, task, seed), limits)
        prompt = render(partial(turns.begin, messages, task.tools))
        while (prompt_ids := episode.next_prompt(prompt)) is not None:
            request_id = f"{trajectory}/turn={episode.n_steps}"
            generation = await generate_turn(engine, prompt_ids, limits, chat.vocab_size, request_id)
            text = _cut_at_stop(chat.text(generation.token_ids), limits.sampling.stop)
            result = checked_result(await ask_environment(limits, environment.step, text), limits)
            response = turns.close(generation, episode.is_last(result.done))
            episode.finish_turn(response, generation, float(result.reward))
            info.update(result.info)
            if result.done:
                break
            if result.history is not None:
                prompt = render(partial(turns.begin, checked_messages(result.history, limits), task.tools))
            else:
                prompt = render(partial(turns.follow, text, response.token_ids, result.messages))
    except TrajectoryFailed as failed:
        log.warning("%s of prompt %s is lost: %s", trajectory, task.uid, failed)
        episode.stop_reason, failure = failed.reason, str(failed)
    finally:
        await close_environment(environment, limits, trajectory)
    return Played(episode.finish(), info, failure)


def lost_trajectory(trajectory: TrajectoryId, task: Task, error: Exception, sink: StepSink) -> Played:
    """End a trajectory without steps, because its environment could not be made."""
    failed = TrajectoryFailed(StopReason.ENVIRONMENT_ERROR, describe_error(error))
    log.warning("%s of prompt %s is lost: %s", trajectory, task.uid, failed)
    end = TrajectoryEnd(trajectory, task.uid, 0, str(failed.reason), 0.0)
    sink.end(end)
    return Played(end, {}, str(failed))


def _cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text up to and including the first stop string; the sampled tokens may continue after it."""
    ends = [found + len(s) for s in stop if (found := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text
