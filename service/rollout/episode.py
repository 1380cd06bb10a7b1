"""The token history of one trajectory, and the steps that are cut from it.

turn 0:  whole prompt                -> response      step 0 carries the whole prompt
turn 1:  history + what is new       -> response      step 1 carries what is new and extends step 0
turn 2:  a prompt that forks         -> response      step 2 carries its whole prompt
"""

from __future__ import annotations

import numpy as np

from service.handoff.prefixes.digest import digest
from service.rollout.chat.conversation import Prompt
from service.rollout.engine import Generation
from service.rollout.environment import Task
from service.rollout.limits import AgentLimits, StopReason
from service.types import (
    NO_VERSION,
    ROUTE_NATIVELY,
    Extension,
    Float32s,
    Int16s,
    Int32s,
    Int64s,
    Step,
    TrajectoryEnd,
    TrajectoryId,
)


class Episode:
    """What was read and said so far in one trajectory."""

    def __init__(self, trajectory: TrajectoryId, task: Task, limits: AgentLimits) -> None:
        self._trajectory = trajectory
        self._uid = task.uid
        self._limits = limits
        self._history = np.empty(limits.max_length, dtype=np.int32)
        self._length = 0
        self._carried = np.empty(0, dtype=np.int32)
        self._extends: Extension | None = None
        self._reward = 0.0
        self.n_steps = 0
        self.n_forks = 0
        """Prompts that do not begin with everything before them."""
        self.stop_reason = StopReason.STOP

    def next_prompt(self, prompt: Prompt) -> Int32s | None:
        """The ids of this turn's whole prompt, or None where the trajectory ends before it."""
        if self.n_steps == self._limits.max_turns:
            self.stop_reason = StopReason.MAX_TURNS
            return None
        length = len(prompt.token_ids) + (0 if prompt.whole else self._length)
        if length > self._limits.max_input_length:
            self.stop_reason = StopReason.LENGTH
            return None
        self._carried = self._what_is_new(prompt)
        self._append(self._carried)
        return self._history[: self._length]

    def step(self, response_ids: Int32s, generation: Generation, reward: float) -> Step:
        """The finished turn; the next one may extend it."""
        self._append(response_ids)
        n_tokens = len(response_ids)
        step = Step(
            trajectory=self._trajectory,
            prompt_uid=self._uid,
            index=self.n_steps,
            prompt_ids=self._carried,
            response_ids=response_ids,
            logprobs=_with_zeros(generation.logprobs, n_tokens),
            loss_mask=_sampled(len(generation.token_ids), n_tokens),
            versions=_with_no_version(generation.versions, n_tokens),
            temperature=self._limits.sampling.temperature,
            reward=reward,
            stop_reason=generation.stop_reason,
            extends=self._extends,
            routed_experts=_experts_of(generation.routed_experts, self._length, len(self._carried) + n_tokens),
        )
        self._extends = Extension(self.n_steps, self._length, digest(self._history[: self._length]))
        self._reward = reward
        self.n_steps += 1
        return step

    def end(self) -> TrajectoryEnd:
        """The record that closes the trajectory."""
        return TrajectoryEnd(self._trajectory, self._uid, self.n_steps, str(self.stop_reason), self._reward)

    def is_last(self, done: bool) -> bool:
        """No turn follows the one that is being finished."""
        return done or self.n_steps + 1 == self._limits.max_turns

    def _what_is_new(self, prompt: Prompt) -> Int32s:
        """What follows the history; a whole prompt that does not begin with it begins a new history."""
        if not prompt.whole:
            return prompt.token_ids
        if np.array_equal(prompt.token_ids[: self._length], self._history[: self._length]):
            return prompt.token_ids[self._length :]
        self.n_forks += 1
        self._length, self._extends = 0, None
        return prompt.token_ids

    def _append(self, token_ids: Int32s) -> None:
        stop = self._length + len(token_ids)
        self._history[self._length : stop] = token_ids
        self._length = stop


def _sampled(n_sampled: int, n_tokens: int) -> np.ndarray:
    loss_mask = np.ones(n_tokens, dtype=np.bool_)
    loss_mask[n_sampled:] = False
    return loss_mask


def _with_zeros(logprobs: Float32s, n_tokens: int) -> Float32s:
    missing = n_tokens - len(logprobs)
    return np.concatenate([logprobs, np.zeros(missing, dtype=np.float32)]) if missing else logprobs


def _with_no_version(versions: Int64s, n_tokens: int) -> Int64s:
    missing = n_tokens - len(versions)
    return np.concatenate([versions, np.full(missing, NO_VERSION, dtype=np.int64)]) if missing else versions


def _experts_of(experts: Int16s | None, total: int, carried: int) -> Int16s | None:
    """The last `carried` of `total` tokens' experts; an engine records none for the last token it sampled."""
    if experts is None:
        return None
    recorded = experts[total - carried : total]
    aligned = np.full((carried, *experts.shape[1:]), ROUTE_NATIVELY, dtype=np.int16)
    aligned[: len(recorded)] = recorded
    return aligned
