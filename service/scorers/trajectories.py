"""What a scorer of rewards is given: the trajectories of a group, as texts and as tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from service.handoff.steps.tables import end_objects, step_objects
from service.rollout.environment import Task
from service.types import Int32s, StepGroup


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the policy."""

    prompt: str
    """What is new in the prompt: all of it at the first turn, then what follows the tokens of an earlier turn."""
    response: str
    prompt_ids: list[int]
    response_ids: list[int]
    reward: float
    """Of the environment."""
    stop_reason: str


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One trajectory of a group."""

    uid: str
    """The prompt's."""
    sample: int
    task: Mapping[str, Any]
    """The row of the dataset: prompt, reward_spec, extra_info, ..."""
    turns: Sequence[Turn]
    reward: float
    """Of the environment, at the end."""
    stop_reason: str
    transcript: str
    """What an agent's run wrote."""

    @property
    def text(self) -> str:
        """Everything, in order."""
        return "".join(turn.prompt + turn.response for turn in self.turns)


def trajectories_of(group: StepGroup, task: Task, decode: Callable[[Sequence[int]], str]) -> list[Trajectory]:
    """The trajectories of a group, by sample.

    `decode`: the text of token ids, special tokens included.
    """
    row, turns = asdict(task), dict[int, list[Turn]]()
    for step in sorted(step_objects(group.steps), key=lambda step: step.index):
        prompt, response = _plain(step.prompt_ids), _plain(step.response_ids)
        reward = float(np.sum(step.reward))
        turn = Turn(decode(prompt), decode(response), prompt, response, reward, step.stop_reason)
        turns.setdefault(step.trajectory.sample, []).append(turn)
    return [
        Trajectory(
            end.prompt_uid,
            end.trajectory.sample,
            row,
            turns.get(end.trajectory.sample, []),
            end.reward,
            end.stop_reason,
            end.transcript.decode(errors="replace"),
        )
        for end in end_objects(group.ends)
    ]


def _plain(token_ids: Int32s) -> list[int]:
    ids: list[int] = token_ids.tolist()
    return ids
