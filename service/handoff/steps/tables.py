"""Tables of steps and of end records: makes them from objects and back, compares, sorts and computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.columns import (
    Column,
    changes,
    codes_of,
    columns_of,
    concat,
    filled,
    lengths_of,
    nested_offsets,
    of_one_type,
    offsets_of,
    select,
    trajectories,
)
from service.handoff.group_bytes import SAID_BYTES
from service.handoff.steps.values import StopReason
from service.types import (
    Bools,
    Ends,
    Extension,
    Float64s,
    Int64s,
    Row,
    Rows,
    Sender,
    Step,
    StepGroup,
    Steps,
    TrajectoryEnd,
    TrajectoryId,
    Uint8s,
)

TURN_BOUNDS = (1, 2, 3, 4, 8, 16, 32)
TURNS = ("1", "2", "3", "4", "5_8", "9_16", "17_32", "33_up")
"""Ranges of turn numbers, counted from 1. There are few ranges, so that each can be a label of a metric."""


def ends_table(ends: Iterable[TrajectoryEnd]) -> Ends:
    """Make a table of end records."""
    ends = list(ends)
    items = [end._asdict() | end.trajectory._asdict() | {"uid": end.prompt_uid} for end in ends]
    return Ends(
        **_item_columns(Ends, items),
        step_offsets_E=offsets_of(np.array([_n_said(end) for end in ends], np.int64)),
        role_S=np.frombuffer(b"".join(end.roles or bytes(_n_said(end)) for end in ends), np.uint8),
        later_reward_S=np.array(
            [reward for end in ends for reward in end.rewards or _n_said(end) * (0.0,)], np.float64
        ),
        offsets_E=offsets_of(np.array([len(end.transcript) for end in ends], np.int64)),
        transcript_N=np.frombuffer(b"".join(end.transcript for end in ends), np.uint8),
    )


def _n_said(end: TrajectoryEnd) -> int:
    return max(len(end.roles), len(end.rewards))


def said_bytes(end: TrajectoryEnd) -> int:
    """Bytes of the roles and later rewards that an end record has for the steps, and of its transcript."""
    return SAID_BYTES * _n_said(end) + len(end.transcript)


def said_steps(steps: Steps, ends: Ends, end_K: Int64s) -> tuple[Int64s, Int64s]:
    """The steps about which an end record has values, and their positions on axis `S`; `end_K`: see `end_of_items`."""
    k = np.flatnonzero(lengths_of(ends.step_offsets_E)[end_K])
    return k, ends.step_offsets_E[end_K[k]] + steps.index_K[k]


class Episodes(NamedTuple):
    """Complete trajectories: their steps in order, with the role and reward of each step.

    end records a b, steps b0 a1 a0     ->      steps a0 a1 b0     end_K [0 0 1]     first_G [0 2 3]
    """

    steps: Steps
    """The steps, sorted by trajectory (in the order of `ends`), then by step index."""
    ends: Ends
    end_K: Int64s
    """The trajectory of each step, as the position of the trajectory's end record in `ends`."""
    first_G: Int64s
    """[G + 1] where each trajectory's steps begin."""
    role_K: Uint8s
    reward_K: Float64s
    """The reward of each step, including rewards given after the step was sent."""

    @staticmethod
    def of(steps: Steps, ends: Ends) -> Episodes:
        """The trajectories of these tables; raises a ValueError if a step came twice, or has no end record or two."""
        steps, end_K = in_order(steps, end_of_items(steps, ends))
        first_G = offsets_of(np.bincount(end_K, minlength=len(ends)))
        role_K, reward_K = np.zeros(len(steps), np.uint8), steps.reward_K.copy()
        k, place_k = said_steps(steps, ends, end_K)
        role_K[k] = ends.role_S[place_k]
        reward_K[k] += ends.later_reward_S[place_k]
        return Episodes(steps, ends, end_K, first_G, role_K, reward_K)


def trajectory_ids(table: Steps | Ends | Rows) -> list[TrajectoryId]:
    """The id of each item's trajectory."""
    axis = columns_of(type(table)).axis
    columns = (getattr(table, f"{name}_{axis}").tolist() for name in TrajectoryId._fields)
    return [TrajectoryId(*identity) for identity in zip(*columns, strict=True)]


def end_of_items(steps: Steps, ends: Ends) -> Int64s:
    """[K] the trajectory of each step, as the position of its end record; raises a ValueError if it has none or two."""
    n_ends = len(ends)
    number_X = trajectories(
        np.concatenate((ends.group_id_E, steps.group_id_K)),
        np.concatenate((ends.sample_E, steps.sample_K)),
        np.concatenate((ends.attempt_E, steps.attempt_K)),
    )
    if (number_X[:n_ends] != np.arange(n_ends)).any() or number_X.max(initial=-1) >= n_ends:
        raise ValueError("a trajectory of steps has no end, or it ends twice")
    return number_X[n_ends:]


def in_order(steps: Steps, number_K: Int64s | None = None) -> tuple[Steps, Int64s]:
    """The steps, sorted by the numbers of their trajectories, then by index; and [K] these numbers, by default in the
    order in which the trajectories appear. Raises a ValueError if a step came twice."""
    if number_K is None:
        number_K = trajectories(steps.group_id_K, steps.sample_K, steps.attempt_K)
    order = np.lexsort((steps.index_K, number_K))
    if (order[1:] < order[:-1]).any():
        steps, number_K = select(steps, order), number_K[order]
    for k in np.flatnonzero(~changes(number_K, steps.index_K))[:1].tolist():
        raise ValueError(f"{name_of(steps, k)} came twice")
    return steps, number_K


def extension_of(steps: Steps, k: int) -> Extension | None:
    """The reference of step `k` of a table to the step that it extends; None if step `k` carries its whole prompt."""
    if steps.extends_K[k] < 0:
        return None
    return Extension(int(steps.extends_K[k]), int(steps.extends_length_K[k]), int(steps.extends_digest_K[k]))


def total_lengths(steps: Steps) -> Int64s:
    """[K] the number of tokens in the whole prompt and response of each step."""
    return np.where(steps.extends_K < 0, np.int64(0), steps.extends_length_K) + lengths_of(steps.offsets_K)


def name_of(steps: Steps, k: int) -> str:
    """The name of step `k` of a table, as shown in error messages."""
    trajectory = TrajectoryId(int(steps.group_id_K[k]), int(steps.sample_K[k]), int(steps.attempt_K[k]))
    return f"{trajectory}/step={steps.index_K[k]}"


# -- responses that were cut at the length limit: their steps have the stop reason `length` ----------------------------


def is_truncated_K(steps: Steps) -> Bools:
    """[K] True where the response was cut at the length limit."""
    return np.array([reason == StopReason.LENGTH for reason in steps.stop_reasons], np.bool_)[steps.stop_reason_K]


def by_turn(tables: Sequence[Steps]) -> Iterator[tuple[str, int, int]]:
    """For each range of turn numbers: (its name, number of responses, number of truncated responses)."""
    turn_K = np.concatenate([np.searchsorted(TURN_BOUNDS, steps.index_K + 1) for steps in tables])
    truncated_K = np.concatenate([is_truncated_K(steps) for steps in tables])
    responses, truncated = (np.bincount(of_K, minlength=len(TURNS)) for of_K in (turn_K, turn_K[truncated_K]))
    for turns, n_responses, n_truncated in zip(TURNS, responses.tolist(), truncated.tolist(), strict=True):
        if n_responses:
            yield turns, n_responses, n_truncated


# -- objects -----------------------------------------------------------------------------------------------------------


def step_objects(steps: Steps) -> list[Step]:
    """The steps of a table as objects; their arrays are views."""
    return [
        Step(
            index=int(steps.index_K[k]),
            reward=float(steps.reward_K[k]),
            extends=extension_of(steps, k),
            note=steps.notes[steps.note_K[k]],
            **fields,
        )
        for k, fields in enumerate(_fields_of_both(steps))
    ]


def row_objects(rows: Rows) -> list[Row]:
    """The rows of a table as objects; their arrays are views."""
    return [
        Row(
            first_step=int(rows.first_step_R[r]),
            last_step=int(rows.last_step_R[r]),
            reward=float(rows.reward_R[r]),
            **fields,
        )
        for r, fields in enumerate(_fields_of_both(rows))
    ]


def _fields_of_both(table: Steps | Rows) -> Iterator[dict[str, Any]]:
    """The fields that a `Step` and a `Row` share, of each item."""
    columns = columns_of(type(table))
    names = ("uid", "stop_reason", "prompt_length", "temperature", "has_logprobs")
    items = zip(*(getattr(table, f"{name}_{columns.axis}").tolist() for name in names), strict=True)
    bounds = pairwise(getattr(table, columns.ragged[0][0]).tolist())
    at_N = None if table.support_size_N is None else nested_offsets(table.support_size_N)
    for of, (start, stop), item in zip(trajectory_ids(table), bounds, items, strict=True):
        uid, stop_reason, prompt_length, temperature, has_logprobs = item
        response = slice(start + prompt_length, stop)
        yield {
            "trajectory": of,
            "prompt_uid": table.uids[uid],
            "prompt_ids": table.token_ids_N[start : start + prompt_length],
            "response_ids": table.token_ids_N[response],
            "logprobs": table.logprobs_N[response] if has_logprobs else None,
            "loss_mask": table.loss_mask_N[response],
            "versions": table.versions_N[response],
            "temperature": temperature,
            "stop_reason": table.stop_reasons[stop_reason],
            "routed_experts": None if table.routed_experts_N is None else table.routed_experts_N[start:stop],
            "support_size": None if table.support_size_N is None else table.support_size_N[response],
            "support": None
            if at_N is None or table.support_U is None
            else table.support_U[at_N[response.start] : at_N[stop]],
        }


def end_objects(ends: Ends) -> list[TrajectoryEnd]:
    """The end records of a table as objects, without roles that are all `main` and later rewards that are all 0."""
    columns = (ends.uid_E, ends.n_steps_E, ends.stop_reason_E, ends.reward_E, ends.info_E)
    items = zip(trajectory_ids(ends), *(column_E.tolist() for column_E in columns), strict=True)
    said, bounds = pairwise(ends.step_offsets_E.tolist()), pairwise(ends.offsets_E.tolist())
    made = []
    for (of, uid, n_steps, stop_reason, reward, info), (first, last), (start, stop) in zip(
        items, said, bounds, strict=True
    ):
        roles, rewards = ends.role_S[first:last], ends.later_reward_S[first:last]
        made.append(
            TrajectoryEnd(
                of, ends.uids[uid], n_steps, ends.stop_reasons[stop_reason], reward,
                roles=roles.tobytes() if roles.any() else b"",
                transcript=ends.transcript_N[start:stop].tobytes(),
                rewards=tuple(rewards.tolist()) if rewards.any() else (),
                info=ends.infos[info],
            )
        )  # fmt: skip
    return made


def step_group(sender: Sender, steps: Iterable[Step], ends: Iterable[TrajectoryEnd]) -> StepGroup:
    """Make one message from step objects and end records."""
    return StepGroup(sender, steps_table(steps), ends_table(ends))


def steps_table(steps: Iterable[Step]) -> Steps:
    """Make a table from step objects; where a step lacks values for a column, the table has the column's fill value.

    >>> from service.types import TrajectoryId
    >>> prompt, response = np.array([10, 20, 30], np.int32), np.array([40, 50], np.int32)
    >>> sampled, versions = np.array([True, True]), np.array([0, 0])
    >>> table = steps_table([Step(TrajectoryId(7, 0), "a", 0, prompt, response, None, sampled, versions)])
    >>> table.token_ids_N.tolist(), table.loss_mask_N.astype(int).tolist(), table.prompt_length_K.tolist()
    ([10, 20, 30, 40, 50], [0, 0, 0, 1, 1], [3])
    """
    steps = list(steps)
    offsets_K = offsets_of(np.array([len(step.prompt_ids) + len(step.response_ids) for step in steps], np.int64))
    tokens: dict[str, Any] = {
        column.name: _token_column(column, steps, offsets_K.tolist()) for column in columns_of(Steps).tokens
    }
    for column in columns_of(Steps).nested:
        given = [values for step in steps if (values := getattr(step, column.name[:-2])) is not None]
        tokens[column.name] = np.concatenate(of_one_type(column, given)) if given else None
    return Steps(offsets_K=offsets_K, **_item_columns(Steps, [_item_values(step) for step in steps]), **tokens)


def _item_columns(table: type, items: list[dict[str, Any]]) -> dict[str, Any]:
    """A table's item columns and names, from each item's values; their keys are column names without the axis."""
    columns, made = columns_of(table), dict[str, Any]()
    codes = {code: names for names, code in columns.names}
    for column in columns.items:
        values = [item[column.name[:-2]] for item in items]
        if column.name in codes:
            made[codes[column.name]], made[column.name] = codes_of(values)
        else:
            made[column.name] = np.array(values, column.dtype)
    return made


def _item_values(step: Step) -> dict[str, Any]:
    """The values of a step's item columns, by their names without axis."""
    extends, length, digest = step.extends or (-1, 0, 0)
    return step.trajectory._asdict() | {
        "index": step.index, "uid": step.prompt_uid, "stop_reason": step.stop_reason, "note": step.note,
        "temperature": step.temperature, "reward": step.reward, "has_logprobs": step.logprobs is not None,
        "prompt_length": len(step.prompt_ids),
        "extends": extends, "extends_length": length, "extends_digest": digest,
    }  # fmt: skip


def _token_column(column: Column, steps: list[Step], offsets: list[int]) -> NDArray[Any] | None:
    name = column.name[:-2]
    given = [getattr(step, name, None) for step in steps]
    known = of_one_type(column, [values for values in given if values is not None])
    if column.optional and not known:
        return None
    column_N = filled(column, offsets[-1], known[0] if known else None)
    rest = iter(known)
    for step, values, (start, stop) in zip(steps, given, pairwise(offsets), strict=True):
        middle = start + len(step.prompt_ids)
        if name == "token_ids":
            column_N[start:middle], column_N[middle:stop] = step.prompt_ids, step.response_ids
        elif values is not None:
            column_N[start if column.about.on_prompt else middle : stop] = next(rest)
    return column_N


def same_step(a: Steps, k: int, b: Steps, j: int) -> bool:
    """Whether item `k` of table `a` and item `j` of table `b` are the same step: equal in all columns, bit by bit, so
    that NaN equals itself; an absent column equals its fill value."""
    both = concat([select(a, np.array([k])), select(b, np.array([j]))])

    def content(item: int) -> list[Any]:
        step = select(both, np.array([item]))
        values = [getattr(step, field.name) for field in dataclasses.fields(Steps)]
        return [value.tobytes() if isinstance(value, np.ndarray) else value for value in values]

    return content(0) == content(1)
