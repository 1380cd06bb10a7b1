"""Steps, ends and rows: objects to tables, tables to objects, and selecting and joining tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.handoff.steps.columns import (
    Column,
    codes_of,
    copy_segments,
    joined_codes,
    lengths_of,
    offsets_of,
    used_codes,
)
from service.types import (
    NO_VERSION,
    ROUTE_NATIVELY,
    Ends,
    Extension,
    Float32s,
    Int16s,
    Int64s,
    Row,
    Rows,
    Sender,
    Step,
    StepGroup,
    Steps,
    TrajectoryEnd,
    TrajectoryId,
)

STEP_COLUMNS = (
    "group_id_K",
    "sample_K",
    "attempt_K",
    "index_K",
    "uid_K",
    "stop_reason_K",
    "temperature_K",
    "reward_K",
    "has_logprobs_K",
    "prompt_length_K",
    "extends_K",
    "extends_length_K",
    "extends_digest_K",
)
ROW_COLUMNS = (
    "group_id_R",
    "sample_R",
    "attempt_R",
    "uid_R",
    "stop_reason_R",
    "first_step_R",
    "last_step_R",
    "temperature_R",
    "has_logprobs_R",
    "prompt_length_R",
)
END_COLUMNS = ("group_id_E", "sample_E", "attempt_E", "uid_E", "n_steps_E", "stop_reason_E", "reward_E")
TOKEN_COLUMNS = ("token_ids_N", "logprobs_N", "loss_mask_N", "versions_N", "token_rewards_N", "routed_experts_N")


def step_group(sender: Sender, steps: Sequence[Step], ends: Sequence[TrajectoryEnd]) -> StepGroup:
    """One message out of step and end objects."""
    return StepGroup(sender, steps_table(steps), ends_table(ends))


def steps_table(steps: Sequence[Step]) -> Steps:
    """Step objects as columns."""
    uid_K, uids = codes_of([step.prompt_uid for step in steps])
    stop_reason_K, stop_reasons = codes_of([step.stop_reason for step in steps])
    prompt_length_K = np.array([len(step.prompt_ids) for step in steps], np.int32)
    length_K = prompt_length_K + np.array([len(step.response_ids) for step in steps], np.int64)
    extends = [step.extends or Extension(-1, 0, 0) for step in steps]
    return Steps(
        uids=uids,
        stop_reasons=stop_reasons,
        group_id_K=np.array([step.trajectory.group_id for step in steps], np.int64),
        sample_K=np.array([step.trajectory.sample for step in steps], np.int32),
        attempt_K=np.array([step.trajectory.attempt for step in steps], np.int32),
        index_K=np.array([step.index for step in steps], np.int32),
        uid_K=uid_K,
        stop_reason_K=stop_reason_K,
        temperature_K=np.array([step.temperature for step in steps], np.float32),
        reward_K=np.array([np.sum(step.reward, dtype=np.float64) for step in steps], np.float64),
        has_logprobs_K=np.array([step.logprobs is not None for step in steps], np.bool_),
        prompt_length_K=prompt_length_K,
        extends_K=np.array([e.step for e in extends], np.int32),
        extends_length_K=np.array([e.length for e in extends], np.int32),
        extends_digest_K=np.array([e.digest for e in extends], np.uint64),
        offsets_K=offsets_of(length_K),
        token_ids_N=_joined((part for step in steps for part in (step.prompt_ids, step.response_ids)), np.int32),
        logprobs_N=_after_prompt(steps, [step.logprobs for step in steps], 0, np.float32),
        loss_mask_N=_after_prompt(steps, [step.loss_mask for step in steps], False, np.bool_),
        versions_N=_after_prompt(steps, [step.versions for step in steps], NO_VERSION, np.int64),
        token_rewards_N=_token_rewards(steps),
        routed_experts_N=_routed_experts(steps),
    )


def ends_table(ends: Sequence[TrajectoryEnd]) -> Ends:
    """Trajectory ends as columns."""
    uid_E, uids = codes_of([end.prompt_uid for end in ends])
    stop_reason_E, stop_reasons = codes_of([end.stop_reason for end in ends])
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
    if len(tables) == 1:
        return tables[0]
    uids, uid_K = joined_codes([(t.uids, t.uid_K) for t in tables])
    stop_reasons, stop_reason_K = joined_codes([(t.stop_reasons, t.stop_reason_K) for t in tables])
    columns = {
        name: np.concatenate([getattr(t, name) for t in tables])
        for name in (*STEP_COLUMNS, "token_ids_N", "logprobs_N", "loss_mask_N", "versions_N")
    }
    columns |= {"uid_K": uid_K, "stop_reason_K": stop_reason_K}
    return Steps(
        uids=uids,
        stop_reasons=stop_reasons,
        offsets_K=offsets_of(np.concatenate([lengths_of(t.offsets_K) for t in tables])),
        token_rewards_N=_joined_token_rewards(tables),
        routed_experts_N=_joined_experts(tables),
        **columns,
    )


def concat_ends(tables: Sequence[Ends]) -> Ends:
    """The ends of several tables, in order, as one table."""
    uids, uid_E = joined_codes([(t.uids, t.uid_E) for t in tables])
    stop_reasons, stop_reason_E = joined_codes([(t.stop_reasons, t.stop_reason_E) for t in tables])
    columns = {name: np.concatenate([getattr(t, name) for t in tables]) for name in END_COLUMNS}
    return Ends(uids, stop_reasons, **(columns | {"uid_E": uid_E, "stop_reason_E": stop_reason_E}))


def select_steps(steps: Steps, index_K: Int64s) -> Steps:
    """The steps at these positions, in this order."""
    start_K, stop_K = steps.offsets_K[index_K], steps.offsets_K[index_K + 1]
    tokens: dict[str, Any] = {
        name: None if (column := getattr(steps, name)) is None else copy_segments(column, start_K, stop_K)
        for name in TOKEN_COLUMNS
    }
    columns = {name: getattr(steps, name)[index_K] for name in STEP_COLUMNS}
    uids, columns["uid_K"] = used_codes(steps.uids, columns["uid_K"])
    return Steps(
        uids=uids, stop_reasons=steps.stop_reasons, offsets_K=offsets_of(stop_K - start_K), **columns, **tokens
    )


def routing_of(steps: Steps) -> tuple[int, ...] | None:
    """(layers, topk) of a table's routed experts; None: it has none."""
    return None if steps.routed_experts_N is None or not len(steps) else steps.routed_experts_N.shape[1:]


def select_ends(ends: Ends, index_E: Int64s) -> Ends:
    """The ends at these positions, in this order."""
    columns = {name: getattr(ends, name)[index_E] for name in END_COLUMNS}
    uids, columns["uid_E"] = used_codes(ends.uids, columns["uid_E"])
    return Ends(uids, ends.stop_reasons, **columns)


def select_rows(rows: Rows, index_R: Int64s) -> Rows:
    """The rows at these positions, in this order; their token columns are copies."""
    start_R, stop_R = rows.offsets_R[index_R], rows.offsets_R[index_R + 1]
    columns: dict[str, Any] = {
        name: None if (column := getattr(rows, name)) is None else column[index_R]
        for name in (*ROW_COLUMNS, "reward_R")
    }
    for name in TOKEN_COLUMNS:
        column = getattr(rows, name)
        columns[name] = None if column is None else copy_segments(column, start_R, stop_R)
        if columns[name] is not None and np.may_share_memory(columns[name], column):
            columns[name] = columns[name].copy()
    return Rows(rows.uids, rows.stop_reasons, offsets_R=offsets_of(stop_R - start_R), **columns)


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


def with_token_rewards(steps: Steps) -> Steps:
    """The same steps with a reward per token: a scalar reward sits on the step's last response token."""
    if steps.token_rewards_N is not None:
        return steps
    return replace(steps, token_rewards_N=_rewards_on_last_token(steps))


def _joined(parts: Iterable[NDArray[Any]], dtype: type[Column]) -> NDArray[Column]:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _after_prompt(
    steps: Sequence[Step], values: Sequence[NDArray[Any] | None], fill: float, dtype: type[Column]
) -> NDArray[Column]:
    """A token column: `fill` on each prompt part and where a step has no values."""
    parts = []
    for step, value in zip(steps, values, strict=True):
        parts.append(np.full(len(step.prompt_ids), fill, dtype))
        parts.append(np.full(len(step.response_ids), fill, dtype) if value is None else np.asarray(value, dtype))
    return _joined(parts, dtype)


def _token_rewards(steps: Sequence[Step]) -> Float32s | None:
    if all(np.ndim(step.reward) == 0 for step in steps):
        return None
    per_token = []
    for step in steps:
        rewards_T = np.zeros(len(step.response_ids), np.float32)
        if np.ndim(step.reward) == 1:
            rewards_T = np.asarray(step.reward, np.float32)
        elif len(rewards_T):
            rewards_T[-1] = step.reward
        per_token.append(rewards_T)
    return _after_prompt(steps, per_token, 0, np.float32)


def _routed_experts(steps: Sequence[Step]) -> Int16s | None:
    known = [step.routed_experts for step in steps if step.routed_experts is not None]
    if not known:
        return None
    unknown = [(len(step.prompt_ids) + len(step.response_ids), *known[0].shape[1:]) for step in steps]
    return np.concatenate(
        [
            np.full(shape, ROUTE_NATIVELY, np.int16) if step.routed_experts is None else step.routed_experts
            for step, shape in zip(steps, unknown, strict=True)
        ]
    )


def _rewards_on_last_token(steps: Steps) -> Float32s:
    rewards_N = np.zeros(len(steps.token_ids_N), np.float32)
    answered = lengths_of(steps.offsets_K) > steps.prompt_length_K
    rewards_N[steps.offsets_K[1:][answered] - 1] = steps.reward_K[answered]
    return rewards_N


def _joined_token_rewards(tables: Sequence[Steps]) -> Float32s | None:
    if all(t.token_rewards_N is None for t in tables):
        return None
    return np.concatenate(
        [_rewards_on_last_token(t) if t.token_rewards_N is None else t.token_rewards_N for t in tables]
    )


def _joined_experts(tables: Sequence[Steps]) -> Int16s | None:
    known = [t.routed_experts_N for t in tables if t.routed_experts_N is not None]
    if not known:
        return None
    return np.concatenate(
        [
            np.full((len(t.token_ids_N), *known[0].shape[1:]), ROUTE_NATIVELY, np.int16)
            if t.routed_experts_N is None
            else t.routed_experts_N
            for t in tables
        ]
    )


def _step_object(steps: Steps, k: int) -> Step:
    start, stop = int(steps.offsets_K[k]), int(steps.offsets_K[k + 1])
    middle = start + int(steps.prompt_length_K[k])
    extension = Extension(int(steps.extends_K[k]), int(steps.extends_length_K[k]), int(steps.extends_digest_K[k]))
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
        extends=None if extension.step < 0 else extension,
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
