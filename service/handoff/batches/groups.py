"""Complete groups, of which a mini-batch is formed, out of steps that did not come through the buffer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from service.handoff.ledger.scores import CompleteGroup
from service.handoff.prefixes.merge import check_whole
from service.handoff.steps.builder import steps_table
from service.handoff.steps.tables import ends_table
from service.types import Step, TrajectoryEnd, TrajectoryId


def complete_groups(steps: Iterable[Step], ends: Iterable[TrajectoryEnd] | None = None) -> list[CompleteGroup]:
    """The groups of whole trajectories, one per group_id, in order of first appearance.

    Without `ends`, each trajectory ends with its last step: with its stop reason, and its reward (the sum, where it
    has one per token) as the trajectory's final reward.

    >>> def step(sample, index, prompt, response, reward=0.0):
    ...     sampled, versions = np.ones(len(response), np.bool_), np.zeros(len(response), np.int64)
    ...     arrays = (np.array(ids, np.int32) for ids in (prompt, response))
    ...     return Step(TrajectoryId(0, sample), "a", index, *arrays, None, sampled, versions, reward=reward)
    >>> [group] = complete_groups([step(0, 0, [1], [2]), step(0, 1, [1, 2, 3], [4], reward=1.0), step(1, 0, [1], [5])])
    >>> group.prompt_uid, group.ends.n_steps_E.tolist(), group.ends.reward_E.tolist()
    ('a', [2, 1], [1.0, 0.0])

    Raises:
        ValueError: a trajectory lacks a step or its end, or its end names another number of steps; a group_id or a
            trajectory has two prompts.
    """
    listed = list(steps)
    last: dict[TrajectoryId, Step] = {}
    for step in listed:
        if step.trajectory not in last or step.index > last[step.trajectory].index:
            last[step.trajectory] = step
    if listed:
        check_whole(steps_table(listed))
    finished = [_end_with(step) for step in last.values()] if ends is None else list(ends)
    _check_ends(last, finished)
    uids: dict[int, str] = {}
    named = [(step.trajectory.group_id, step.prompt_uid) for step in last.values()]
    named += [(end.trajectory.group_id, end.prompt_uid) for end in finished]
    for group_id, uid in named:
        if uids.setdefault(group_id, uid) != uid:
            raise ValueError(
                f"group={group_id} is of the prompts {uids[group_id]!r} and {uid!r}; it can be of one only"
            )
    steps_of: dict[int, list[Step]] = {group_id: [] for group_id in uids}
    ends_of: dict[int, list[TrajectoryEnd]] = {group_id: [] for group_id in uids}
    for step in listed:
        steps_of[step.trajectory.group_id].append(step)
    for end in finished:
        ends_of[end.trajectory.group_id].append(end)
    return [CompleteGroup(o, uid, steps_table(steps_of[o]), ends_table(ends_of[o])) for o, uid in uids.items()]


def _end_with(step: Step) -> TrajectoryEnd:
    reward = float(np.sum(step.reward, dtype=np.float64))
    return TrajectoryEnd(step.trajectory, step.prompt_uid, step.index + 1, step.stop_reason, reward)


def _check_ends(last: dict[TrajectoryId, Step], ends: list[TrajectoryEnd]) -> None:
    n_steps = {of: step.index + 1 for of, step in last.items()}
    ended = {end.trajectory for end in ends}
    if len(ended) != len(ends):
        raise ValueError("a trajectory ends twice")
    for of in n_steps:
        if of not in ended:
            raise ValueError(f"{of} has no end")
    for end in ends:
        if end.n_steps != (there := n_steps.get(end.trajectory, 0)):
            raise ValueError(f"{end.trajectory} ended after {end.n_steps} steps, but {there} are there")
