"""Makes complete groups, the input of a mini-batch, from steps that did not come through the buffer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from service.columns import select
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.prefixes.merge import check_whole
from service.handoff.prefixes.sharing import shared_form
from service.handoff.steps.builder import steps_table
from service.handoff.steps.tables import ends_table
from service.types import Step, TrajectoryEnd, TrajectoryId


def complete_groups(steps: Iterable[Step], ends: Iterable[TrajectoryEnd] | None = None) -> list[CompleteGroup]:
    """Make one group per group_id from whole trajectories, in order of the first appearance of the group_id.

    Steps may have whole prompts or references. Without `ends`, each trajectory ends with its last step, and has the
    stop reason and the reward of this step.

    >>> def step(sample, index, prompt, response, reward=0.0):
    ...     sampled, versions = np.ones(len(response), np.bool_), np.zeros(len(response), np.int64)
    ...     arrays = (np.array(ids, np.int32) for ids in (prompt, response))
    ...     return Step(TrajectoryId(0, sample), "a", index, *arrays, None, sampled, versions, reward=reward)
    >>> [group] = complete_groups([step(0, 0, [1], [2]), step(0, 1, [1, 2, 3], [4], reward=1.0), step(1, 0, [1], [5])])
    >>> group.prompt_uid, group.ends.n_steps_E.tolist(), group.ends.reward_E.tolist()
    ('a', [2, 1], [1.0, 0.0])

    Raises:
        ValueError: a trajectory lacks a step or the end record, or the end record has another number of steps; a
            group_id or a trajectory has two prompts.
    """
    listed = list(steps)
    last: dict[TrajectoryId, Step] = {}
    for step in sorted(listed, key=lambda step: step.index):
        last[step.trajectory] = step
    if ends is None:
        ends = [
            TrajectoryEnd(of, step.prompt_uid, step.index + 1, step.stop_reason, step.reward)
            for of, step in last.items()
        ]
    finished = list(ends)
    n_steps = {step.trajectory: step.index + 1 for step in last.values()}
    n_told = {end.trajectory: end.n_steps for end in finished}
    if len(n_told) != len(finished):
        raise ValueError("a trajectory ends twice")
    for of in n_steps | n_told:
        if of not in n_told:
            raise ValueError(f"{of} has no end")
        if n_told[of] != n_steps.get(of, 0):
            raise ValueError(f"{of} ended after {n_told[of]} steps, but {n_steps.get(of, 0)} are there")
    uids: dict[int, str] = {}
    items: list[Step | TrajectoryEnd] = [*listed, *finished]
    for item in items:
        uid = uids.setdefault(item.trajectory.group_id, item.prompt_uid)
        if uid != item.prompt_uid:
            of = item.trajectory
            raise ValueError(f"group={of.group_id} is of the prompts {uid!r} and {item.prompt_uid!r}; it can be of one")
    all_steps, all_ends = check_whole(steps_table(shared_form(listed))), ends_table(finished)
    return [
        CompleteGroup(
            group_id, uid,
            select(all_steps, np.flatnonzero(all_steps.group_id_K == group_id)),
            select(all_ends, np.flatnonzero(all_ends.group_id_E == group_id)),
        )
        for group_id, uid in uids.items()
    ]  # fmt: skip
