"""The agent loop: plays one trajectory, token ids in and token ids out, and appends one step per turn.

    reset -> prompt -> [length?] -> generate -> step of the environment -> append the step -> next prompt -> ...

The trajectory's end with its reason comes last. An unfinished turn appends no step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from service.handoff.steps.builder import StepSink
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
from service.rollout.environment import Environment, Message, StepResult, Task
from service.rollout.episode import Episode
from service.rollout.limits import AgentLimits
from service.types import TrajectoryEnd, TrajectoryId

log = logging.getLogger(__name__)


class Observed(NamedTuple):
    """A trajectory as messages and numbers, for people and metrics."""

    end: TrajectoryEnd
    env_class: str
    messages: Sequence[Message]
    rewards: Sequence[float]
    """One per step."""
    info: Mapping[str, float]
    """The environment's `info`, summed over the steps."""
    n_forks: int
    """Prompts that rewrote the history."""
    failure: str = ""
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
    observe: Callable[[Observed], None] | None = None,
) -> TrajectoryEnd:
    """Play one episode; `sink` gets a step for each finished turn, then the trajectory's end, which is returned."""
    limits = limits.at(task.temperature)
    episode, transcript = Episode(trajectory, task, limits, sink), _Transcript()
    turns = conversation(limits.conversation, chat)
    try:
        messages = checked_messages(await ask_environment(environment.reset(task, seed), limits), limits)
        transcript.add_messages(messages)
        prompt = render(partial(turns.begin, messages, task.tools))
        while (prompt_ids := episode.next_prompt(prompt)) is not None:
            request_id = f"{trajectory}/turn={episode.n_steps}"
            generation = await generate_turn(engine, prompt_ids, limits, chat.vocab_size, request_id)
            text = _cut_at_stop(chat.text(generation.token_ids), limits.sampling.stop)
            result = checked_result(await ask_environment(environment.step(text), limits), limits)
            response = turns.close(generation, episode.is_last(result.done))
            transcript.add_turn(text, result)
            episode.finish_turn(response, generation, float(result.reward))
            if result.done:
                break
            if result.history is not None:
                prompt = render(partial(turns.begin, checked_messages(result.history, limits), task.tools))
            else:
                prompt = render(partial(turns.follow, text, response.token_ids, result.messages))
    except TrajectoryFailed as failed:
        log.warning("%s of prompt %s is lost: %s", trajectory, task.uid, failed)
        episode.stop_reason, transcript.failure = failed.reason, str(failed)
    finally:
        await close_environment(environment, limits, trajectory)
    end = episode.finish()
    if observe is not None:
        observe(transcript.observed(end, task, episode.n_forks))
    return end


class _Transcript:
    """The messages, rewards and info of one trajectory."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._rewards: list[float] = []
        self._info: Counter[str] = Counter()
        self.failure = ""

    def add_messages(self, messages: Sequence[Message]) -> None:
        self._messages += messages

    def add_turn(self, text: str, result: StepResult) -> None:
        self._messages.append(Message(role="assistant", content=text))
        self._rewards.append(float(result.reward))
        if result.info:
            self._info.update(result.info)
        if not result.done:
            self.add_messages(result.messages)

    def observed(self, end: TrajectoryEnd, task: Task, n_forks: int) -> Observed:
        return Observed(end, task.env_class, self._messages, self._rewards, self._info, n_forks, self.failure)


def _cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text up to and including the first stop string; the sampled tokens may continue after it."""
    ends = [found + len(s) for s in stop if (found := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text
