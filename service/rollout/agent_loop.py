"""The agent loop: plays one trajectory by exchanging token ids with the engine, and sends one step per turn to a sink.

    reset -> prompt -> [length?] -> generate -> step of the environment -> append the step -> next prompt -> ...

Each role has its own conversation, and the environment chooses the role of the next turn. The loop sends one last
record, with the reason why the trajectory ended. A turn that is not finished gives no step. `[length?]`: a prompt that
is too long ends the trajectory. The steps:

turn 0:  whole prompt                -> response      step 0 carries the whole prompt
turn 1:  history + new tokens        -> response      step 1 carries the new tokens and extends step 0
turn 2:  another role's first prompt -> response      step 2 carries the tokens that begin no role's history
turn 3:  history of turn 1 + tokens  -> response      step 3 carries the new tokens and extends step 1
turn 4:  a prompt that does not      -> response      step 4 extends the history that shares its longest prefix
         begin with the history
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from service.columns import digest
from service.errors import in_one_line
from service.handoff.group_bytes import TRANSCRIPT_BYTES
from service.handoff.prefixes.sharing import longest_prefix
from service.handoff.steps.info import packed_info
from service.handoff.steps.values import NEEDED, ROLES, StopReason, is_reward, packed_roles
from service.rollout.chat.chat import Chat, MessagesRefused
from service.rollout.chat.conversation import Conversation, Prompt, Response, generation_of, without_loss
from service.rollout.chat.frozen import FrozenModels
from service.rollout.engine import AgentLimits, Engine, Generation, validate_generation
from service.rollout.env_guard import EnvGuard
from service.rollout.environment import MAIN, StepResult, Task, TrajectoryFailed
from service.rollout.step_sinks import StepSink
from service.types import ROUTE_NATIVELY, Experts, Extension, Int32s, Step, TrajectoryEnd, TrajectoryId

log = logging.getLogger(__name__)


class TrajectoryResult(NamedTuple):
    """The result of playing one trajectory, apart from its steps."""

    end: TrajectoryEnd
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
    limits = limits.of_trajectory(trajectory, task.temperature)
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
    return TrajectoryResult(episode.finish(failure, packed_info(environment.name, info)), failure)


async def generate_turn(
    engine: Engine, prompt_ids: Int32s, limits: AgentLimits, vocab_size: int, request_id: str
) -> Generation:
    """Sample one turn of the policy from the engine. Errors that the engine raises are not caught.

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
    """The text for the environment: the response up to the first stop string, which is included. Text after the stop
    string is dropped, even within a token."""
    text = chat.said(token_ids)
    ends = [found + len(s) for s in stop if (found := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text


class History:
    """All tokens of one role so far (prompts and responses), and the step of the role's newest turn."""

    def __init__(self, max_length: int) -> None:
        self.carried = np.empty(0, dtype=np.int32)
        """Prompt tokens of the current turn that no earlier step carries."""
        self.extends: Extension | None = None
        self._tokens = np.empty(max_length, dtype=np.int32)
        self._length = 0

    @property
    def token_ids(self) -> Int32s:
        """All tokens of the role so far."""
        return self._tokens[: self._length]

    def begin(self, prompt: Prompt, others: Iterable[History]) -> None:
        """Start a turn: add the tokens of its prompt to the history. `others`: the histories of all roles."""
        token_ids, start = prompt.token_ids, 0
        if prompt.whole:
            start = self._length
            if not start or not np.array_equal(token_ids[:start], self.token_ids):
                self.extends = _longest_prefix(token_ids, others)
                self._length = start = 0 if self.extends is None else self.extends.length
                self._tokens[:start] = token_ids[:start]
        self.carried = token_ids[start:]
        self.append(self.carried)

    def append(self, token_ids: Int32s) -> None:
        """Append tokens to the history."""
        stop = self._length + len(token_ids)
        self._tokens[self._length : stop] = token_ids
        self._length = stop


def _longest_prefix(prompt_ids: Int32s, histories: Iterable[History]) -> Extension | None:
    """A reference to the longest prefix that a prompt shares with a history; None if no history shares a token."""
    ended = [(history.extends.step, history.token_ids) for history in histories if history.extends is not None]
    return longest_prefix(prompt_ids, sorted(ended, key=lambda turn: turn[0], reverse=True))


class Episode:
    """One trajectory while it is played. It sends its steps, and the record that ends it, to `sink`."""

    def __init__(self, trajectory: TrajectoryId, task: Task, limits: AgentLimits, sink: StepSink) -> None:
        self._trajectory = trajectory
        self._uid = task.uid
        self._limits = limits
        self._sink = sink
        self._histories: defaultdict[str, History] = defaultdict(lambda: History(limits.max_length))
        self._roles: list[str] = []
        """The role of each step."""
        self._given: dict[int, float] = {}
        """Rewards that steps got after they were sent, by step index."""
        self._reward = 0.0
        """The reward of the newest turn of `main`, including rewards that were added to the turn later."""
        self._truncated = False
        """Whether the newest response was cut at `max_generate_length`."""
        self.stop_reason = StopReason.STOP

    @property
    def n_steps(self) -> int:
        """Number of finished turns so far."""
        return len(self._roles)

    def next_prompt(self, prompt: Prompt, role: str = MAIN) -> Int32s | None:
        """[Q] token ids of the whole prompt of the role's next turn; None if a limit ends the trajectory before this
        turn."""
        if self.n_steps == self._limits.max_turns:
            self.stop_reason = StopReason.MAX_TURNS
            return None
        history = self._histories[role]
        length = len(prompt.token_ids) + (0 if prompt.whole else len(history.token_ids))
        if length > self._limits.max_input_length:
            self.stop_reason = StopReason.LENGTH
            return None
        history.begin(prompt, self._histories.values())
        return history.token_ids

    def finish_turn(self, response: Response, generation: Generation, reward: float, role: str = MAIN) -> None:
        """End the current turn of a role: send the turn as a step to the sink. The role's next step may continue this
        step."""
        history, index = self._histories[role], self.n_steps
        history.append(response.token_ids)
        step = step_of(
            history.carried,
            response,
            generation,
            history.extends,
            trajectory=self._trajectory,
            prompt_uid=self._uid,
            index=index,
            temperature=self._limits.sampling.temperature,
            reward=reward,
        )
        self._sink.append(step)
        history.extends = Extension(index, len(history.token_ids), digest(history.token_ids))
        self._roles.append(role)
        if role == MAIN:
            self._reward = reward
        self._truncated = generation.stop_reason == StopReason.LENGTH

    def give(self, rewards: Mapping[str, float]) -> list[str]:
        """Add rewards to the newest turns of roles. Returns the refused roles: they had no turn, or their reward would
        become too large."""
        refused = []
        for role, reward in rewards.items():
            newest = self.n_steps - 1 - self._roles[::-1].index(role) if role in self._roles else -1
            given = self._given.get(newest, 0.0) + reward
            of_main = self._reward + (reward if role == MAIN else 0.0)
            if newest < 0 or not is_reward(given) or not is_reward(of_main):
                refused.append(role)
            else:
                self._given[newest], self._reward = given, of_main
        return refused

    def finish(self, failure: str = "", info: str = "") -> TrajectoryEnd:
        """Send the record that ends the trajectory to the sink, and return the record. `failure`: the reason why the
        trajectory failed; `info`: the environment's numbers, each summed over the steps."""
        if self._truncated and self.stop_reason in (StopReason.STOP, StopReason.MAX_TURNS):
            self.stop_reason = StopReason.TRUNCATED
        named = [role for role in self._limits.roles if role not in ROLES]
        end = TrajectoryEnd(
            self._trajectory,
            self._uid,
            self.n_steps,
            str(self.stop_reason),
            self._reward,
            packed_roles(self._roles, named),
            failure.encode(errors="replace")[:TRANSCRIPT_BYTES],
            rewards=tuple(self._given.get(index, 0.0) for index in range(self.n_steps)) if self._given else (),
            info="" if failure else info,
        )
        self._sink.end(end)
        return end

    def is_last(self, done: bool) -> bool:
        """True if no turn follows the current turn."""
        return done or self.n_steps + 1 == self._limits.max_turns


def step_of(
    prompt_ids: Int32s, response: Response, generation: Generation, extends: Extension | None, **others: Any
) -> Step:
    """The step of a turn whose prompt has the tokens `prompt_ids` after those that it extends; `others`: further
    fields."""
    carried = len(prompt_ids) + len(response.token_ids)
    total = carried + (0 if extends is None else extends.length)
    return Step(
        prompt_ids=prompt_ids,
        response_ids=response.token_ids,
        logprobs=response.logprobs,
        loss_mask=response.loss_mask,
        versions=response.versions,
        stop_reason=generation.stop_reason,
        extends=extends,
        routed_experts=_experts_of(generation.routed_experts, total, carried),
        support_size=response.support_size,
        support=response.support,
        **others,
    )


def _experts_of(experts: Experts | None, total: int, carried: int) -> Experts | None:
    """[carried, layers, topk] the routed experts of the last `carried` tokens of a turn that has `total` tokens. The
    last sampled token gets -1, because the engine records no experts for it."""
    if experts is None:
        return None
    recorded = experts[total - carried : total]
    aligned: Any = np.full((carried, *experts.shape[1:]), ROUTE_NATIVELY, np.int16).astype(experts.dtype)
    aligned[: len(recorded)] = recorded
    return cast(Experts, aligned)
