"""The input of a scorer that gives rewards: the trajectories of a group, as texts and as tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from service.handoff.steps.tables import end_objects, step_objects
from service.handoff.steps.values import roles_from
from service.rollout.environment import Task
from service.types import StepGroup


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the policy in a trajectory, as a scorer gets it."""

    prompt: str
    """The new part of the prompt. In the first turn this is the whole prompt; in later turns, the text that follows the
    tokens of an earlier turn."""
    response: str
    prompt_ids: list[int]
    response_ids: list[int]
    reward: float
    """The environment's reward of the turn, including rewards that it gave the turn later."""
    stop_reason: str
    role: str
    """The role of the turn: `main` unless the configuration names `roles`, or an agent has conversations with other
    roles."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One trajectory of a group, as a scorer that gives rewards gets it."""

    uid: str
    """The unique id of the prompt in the dataset."""
    sample: int
    task: Mapping[str, Any]
    """The row of the dataset: prompt, reward_spec, extra_info, ..."""
    turns: Sequence[Turn]
    reward: float
    """The environment's reward at the end of the trajectory."""
    stop_reason: str
    transcript: str
    """The output of an agent's run."""

    @property
    def text(self) -> str:
        """The texts of all turns, in order."""
        return "".join(turn.prompt + turn.response for turn in self.turns)


def trajectories_of(
    group: StepGroup, task: Task, decode: Callable[[Sequence[int]], str], named: Sequence[str] = ()
) -> list[Trajectory]:
    """The trajectories of a group, in the order of the samples.

    `decode` turns token ids into text with special tokens; `named`: the roles that the configuration names.
    """
    row, turns, ends = asdict(task), dict[int, list[Turn]](), end_objects(group.ends)
    roles = {end.trajectory: roles_from(end.roles, end.n_steps, named) for end in ends}
    later = {end.trajectory: end.rewards for end in ends if end.rewards}
    for step in sorted(step_objects(group.steps), key=lambda step: step.index):
        prompt: list[int] = step.prompt_ids.tolist()
        response: list[int] = step.response_ids.tolist()
        of, index = step.trajectory, step.index
        reward = float(np.sum(step.reward)) + (later[of][index] if of in later else 0.0)
        turn = Turn(decode(prompt), decode(response), prompt, response, reward, step.stop_reason, roles[of][index])
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
        for end in ends
    ]
