"""Makes tables and messages from `Step` and `TrajectoryEnd` objects."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.columns import Column, codes_of, columns_of, filled, of_one_type, offsets_of
from service.handoff.steps.tables import NO_EXTENSION, ends_table
from service.types import Sender, Step, StepGroup, Steps, TrajectoryEnd


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
    items = [_item_values(step) for step in steps]
    offsets_K = offsets_of(np.array([len(step.prompt_ids) + len(step.response_ids) for step in steps], np.int64))
    columns: dict[str, Any] = {
        column.name: np.array([item[column.name[:-2]] for item in items], column.dtype)
        for column in columns_of(Steps).items
        if column.name not in {code for _, code in columns_of(Steps).names}
    }
    for names, code in columns_of(Steps).names:
        columns[names], columns[code] = codes_of([item[code[:-2]] for item in items])
    tokens: dict[str, Any] = {
        column.name: _token_column(column, steps, offsets_K.tolist()) for column in columns_of(Steps).tokens
    }
    return Steps(offsets_K=offsets_K, **columns, **tokens)


def _item_values(step: Step) -> dict[str, Any]:
    """The values of a step's item columns, by their names without axis."""
    group_id, sample, attempt = step.trajectory
    extends, length, digest = step.extends or NO_EXTENSION
    return {
        "group_id": group_id, "sample": sample, "attempt": attempt, "index": step.index, "uid": step.prompt_uid,
        "stop_reason": step.stop_reason, "note": step.note, "temperature": step.temperature,
        "reward": step.reward, "has_logprobs": step.logprobs is not None, "prompt_length": len(step.prompt_ids),
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
