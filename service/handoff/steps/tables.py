"""Tables of steps and ends: what their columns say, and the objects of the library made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from service.columns import codes_of, concat, lengths_of
from service.types import (
    Ends,
    Extension,
    Int64s,
    Row,
    Rows,
    Step,
    Steps,
    TrajectoryEnd,
    TrajectoryId,
)

NO_EXTENSION = Extension(-1, 0, 0)
"""The reference of a step that carries its whole prompt."""


def ends_table(ends: Iterable[TrajectoryEnd]) -> Ends:
    """Trajectory ends as columns."""
    ends = list(ends)
    uids, uid_E = codes_of([end.prompt_uid for end in ends])
    stop_reasons, stop_reason_E = codes_of([end.stop_reason for end in ends])
    return Ends(
        uids=uids,
        stop_reasons=stop_reasons,
        group_id_E=np.array([end.trajectory.group_id for end in ends], np.int64),
        sample_E=np.array([end.trajectory.sample for end in ends], np.int32),
        attempt_E=np.array([end.trajectory.attempt for end in ends], np.int32),
        uid_E=uid_E,
        n_steps_E=np.array([end.n_steps for end in ends], np.int32),
        stop_reason_E=stop_reason_E,
        reward_E=np.array([end.reward for end in ends], np.float64),
    )


def trajectory_ids(steps: Steps) -> list[TrajectoryId]:
    """The trajectory of each step."""
    columns = (steps.group_id_K.tolist(), steps.sample_K.tolist(), steps.attempt_K.tolist())
    return [TrajectoryId(*identity) for identity in zip(*columns, strict=True)]


def items_by_trajectory(steps: Steps) -> dict[TrajectoryId, list[int]]:
    """The positions of each trajectory's steps, by index."""
    items: dict[TrajectoryId, list[int]] = {}
    for k, of in enumerate(trajectory_ids(steps)):
        items.setdefault(of, []).append(k)
    index = steps.index_K.tolist()
    for members in items.values():
        members.sort(key=index.__getitem__)
    return items


def concat_steps(tables: Sequence[Steps]) -> Steps:
    """The steps of several tables, in order, as one table."""
    if len(tables) > 1 and any(table.token_rewards_N is not None for table in tables):
        tables = [with_token_rewards(table) for table in tables]
    return concat(tables)


def extension_of(steps: Steps, k: int) -> Extension | None:
    """What item `k` extends; None if it carries its whole prompt."""
    if steps.extends_K[k] < 0:
        return None
    return Extension(int(steps.extends_K[k]), int(steps.extends_length_K[k]), int(steps.extends_digest_K[k]))


def total_lengths(steps: Steps) -> Int64s:
    """Tokens of each step's whole prompt and response."""
    return np.where(steps.extends_K < 0, np.int64(0), steps.extends_length_K) + lengths_of(steps.offsets_K)


def name_of(steps: Steps, k: int) -> str:
    """Item `k` of a table, as messages name it."""
    trajectory = TrajectoryId(int(steps.group_id_K[k]), int(steps.sample_K[k]), int(steps.attempt_K[k]))
    return f"{trajectory}/step={steps.index_K[k]}"


def routing_of(steps: Steps) -> tuple[int, ...] | None:
    """(layers, topk) of a table's routed experts; None: it has none."""
    return None if steps.routed_experts_N is None or not len(steps) else steps.routed_experts_N.shape[1:]


def with_token_rewards(steps: Steps) -> Steps:
    """The same steps with a reward per token: a scalar reward sits on the step's last response token."""
    if steps.token_rewards_N is not None:
        return steps
    rewards_N = np.zeros(len(steps.token_ids_N), np.float32)
    answered = lengths_of(steps.offsets_K) > steps.prompt_length_K
    rewards_N[steps.offsets_K[1:][answered] - 1] = steps.reward_K[answered]
    return replace(steps, token_rewards_N=rewards_N)


def step_objects(steps: Steps) -> list[Step]:
    """The steps of a table as objects; their arrays are views."""
    return [_step_object(steps, k) for k in range(len(steps))]


def end_objects(ends: Ends) -> list[TrajectoryEnd]:
    """The ends of a table as objects."""
    return [
        TrajectoryEnd(
            TrajectoryId(int(ends.group_id_E[e]), int(ends.sample_E[e]), int(ends.attempt_E[e])),
            ends.uids[ends.uid_E[e]],
            int(ends.n_steps_E[e]),
            ends.stop_reasons[ends.stop_reason_E[e]],
            float(ends.reward_E[e]),
        )
        for e in range(len(ends))
    ]


def row_objects(rows: Rows) -> list[Row]:
    """The rows of a table as objects; their arrays are views."""
    return [_row_object(rows, r) for r in range(len(rows))]


def _step_object(steps: Steps, k: int) -> Step:
    start, stop = int(steps.offsets_K[k]), int(steps.offsets_K[k + 1])
    middle = start + int(steps.prompt_length_K[k])
    rewards_N, experts_N = steps.token_rewards_N, steps.routed_experts_N
    return Step(
        trajectory=TrajectoryId(int(steps.group_id_K[k]), int(steps.sample_K[k]), int(steps.attempt_K[k])),
        prompt_uid=steps.uids[steps.uid_K[k]],
        index=int(steps.index_K[k]),
        prompt_ids=steps.token_ids_N[start:middle],
        response_ids=steps.token_ids_N[middle:stop],
        logprobs=steps.logprobs_N[middle:stop] if steps.has_logprobs_K[k] else None,
        loss_mask=steps.loss_mask_N[middle:stop],
        versions=steps.versions_N[middle:stop],
        temperature=float(steps.temperature_K[k]),
        reward=float(steps.reward_K[k]) if rewards_N is None else rewards_N[middle:stop],
        stop_reason=steps.stop_reasons[steps.stop_reason_K[k]],
        extends=extension_of(steps, k),
        routed_experts=None if experts_N is None else experts_N[start:stop],
    )


def _row_object(rows: Rows, r: int) -> Row:
    start, stop = int(rows.offsets_R[r]), int(rows.offsets_R[r + 1])
    middle = start + int(rows.prompt_length_R[r])
    rewards_N, experts_N, reward_R = rows.token_rewards_N, rows.routed_experts_N, rows.reward_R
    return Row(
        trajectory=TrajectoryId(int(rows.group_id_R[r]), int(rows.sample_R[r]), int(rows.attempt_R[r])),
        prompt_uid=rows.uids[rows.uid_R[r]],
        first_step=int(rows.first_step_R[r]),
        last_step=int(rows.last_step_R[r]),
        prompt_ids=rows.token_ids_N[start:middle],
        response_ids=rows.token_ids_N[middle:stop],
        logprobs=rows.logprobs_N[middle:stop] if rows.has_logprobs_R[r] else None,
        loss_mask=rows.loss_mask_N[middle:stop],
        versions=rows.versions_N[middle:stop],
        temperature=float(rows.temperature_R[r]),
        rewards=np.zeros(stop - middle, np.float32) if rewards_N is None else rewards_N[middle:stop],
        stop_reason=rows.stop_reasons[rows.stop_reason_R[r]],
        routed_experts=None if experts_N is None else experts_N[start:stop],
        reward=None if reward_R is None else float(reward_R[r]),
    )
