"""The agent loop: one trajectory, token in, token out, a step per turn.

    reset -> prompt -> [length?] -> generate -> step of the environment -> emit the step -> next prompt -> ...

At last comes the record that closes the trajectory, with its reason. A turn that was not finished emits no step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from service.rollout.chat.chat import Chat
from service.rollout.chat.conversation import conversation
from service.rollout.engine import Engine
from service.rollout.env_guard import (
    TrajectoryFailed,
    ask,
    checked,
    checked_messages,
    close,
    generate,
    rendered,
)
from service.rollout.environment import Environment, Message, StepResult, Task
from service.rollout.episode import Episode
from service.rollout.limits import AgentLimits, StopReason
from service.types import Step, TrajectoryEnd, TrajectoryId

__all__ = ["AgentLimits", "Observed", "StopReason", "run_trajectory"]

log = logging.getLogger(__name__)


class Observed(NamedTuple):
    """A trajectory in words and numbers, for people and metrics."""

    end: TrajectoryEnd
    env_class: str
    messages: Sequence[Message]
    rewards: Sequence[float]
    """One per step."""
    info: Mapping[str, float]
    """What the environment said, summed over the steps."""
    n_forks: int
    """Prompts that rewrote the history."""
    failure: str = ""
    """Why the trajectory is lost, if it is."""


async def run_trajectory(
    trajectory: TrajectoryId,
    task: Task,
    environment: Environment,
    engine: Engine,
    chat: Chat,
    limits: AgentLimits,
    seed: int,
    observe: Callable[[Observed], None] | None = None,
) -> AsyncGenerator[Step | TrajectoryEnd, None]:
    """Play one episode: each finished turn as a `Step`, at last the `TrajectoryEnd`."""
    limits = limits.at(task.temperature)
    episode, script = Episode(trajectory, task, limits), _Script()
    talk = conversation(limits.conversation, chat)
    try:
        messages = checked_messages(await ask(environment.reset(task, seed), limits), limits)
        script.read(messages)
        prompt = rendered(partial(talk.begin, messages, task.tools))
        while (prompt_ids := episode.next_prompt(prompt)) is not None:
            request_id = f"{trajectory}/turn={episode.n_steps}"
            generation = await generate(engine, prompt_ids, limits, chat.vocab_size, request_id)
            text = _cut_at_stop(chat.text(generation.token_ids), limits.sampling.stop)
            result = checked(await ask(environment.step(text), limits), limits)
            response_ids = talk.close(generation, episode.is_last(result.done))
            script.said(text, result)
            yield episode.step(response_ids, generation, float(result.reward))
            if result.done:
                break
            if result.history is not None:
                prompt = rendered(partial(talk.begin, checked_messages(result.history, limits), task.tools))
            else:
                prompt = rendered(partial(talk.follow, text, response_ids, result.messages))
    except TrajectoryFailed as failed:
        log.warning("%s of prompt %s is lost: %s", trajectory, task.uid, failed)
        episode.stop_reason, script.failure = failed.reason, str(failed)
    finally:
        await close(environment, limits, trajectory)
    if observe is not None:
        observe(script.observed(episode, task))
    yield episode.end()


class _Script:
    """What was said, and what it brought."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._rewards: list[float] = []
        self._info: Counter[str] = Counter()
        self.failure = ""

    def read(self, messages: Sequence[Message]) -> None:
        self._messages += messages

    def said(self, text: str, result: StepResult) -> None:
        self._messages.append(Message(role="assistant", content=text))
        self._rewards.append(float(result.reward))
        if result.info:
            self._info.update(result.info)
        if not result.done:
            self.read(result.messages)

    def observed(self, episode: Episode, task: Task) -> Observed:
        end = episode.end()
        return Observed(end, task.env_class, self._messages, self._rewards, self._info, episode.n_forks, self.failure)


def _cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text up to and including the first stop string; token ids may run past it."""
    ends = [found + len(s) for s in stop if (found := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text
