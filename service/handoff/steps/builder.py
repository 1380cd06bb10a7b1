"""Builds messages: steps and trajectory ends are appended to columns as they happen.

    StepColumns().append(step), .append(step), .end(end)  ->  step_group(sender)  ->  service.handoff.steps.wire.encode

Each step is a `Step` object; `steps_table` makes a table of several.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.columns import Column, codes_of, columns_of, filled, of_one_type, offsets_of
from service.handoff.steps.tables import NO_EXTENSION, ends_table, said_bytes
from service.types import Sender, Step, StepGroup, Steps, TrajectoryEnd, TrajectoryId

_TOKEN_COLUMNS = {column.name[:-2]: column for column in columns_of(Steps).tokens}
_OPTIONAL = [name for name, column in _TOKEN_COLUMNS.items() if column.optional]
_REQUIRED_BYTES = sum(column.dtype.itemsize for column in _TOKEN_COLUMNS.values() if not column.optional)
"""Bytes of one token in all required columns."""


class StepColumns:
    """The steps and trajectory ends of one message, appended as they happen.

    >>> made = StepColumns()
    >>> prompt, response = np.array([10, 20, 30], np.int32), np.array([40, 50], np.int32)
    >>> sampled, versions = np.array([True, True]), np.array([0, 0])
    >>> made.append(Step(TrajectoryId(7, 0), "a", 0, prompt, response, None, sampled, versions))
    >>> steps = made.steps()
    >>> steps.token_ids_N.tolist(), steps.loss_mask_N.astype(int).tolist(), steps.prompt_length_K.tolist()
    ([10, 20, 30, 40, 50], [0, 0, 0, 1, 1], [3])
    """

    def __init__(self) -> None:
        self.n_bytes = 0
        """Bytes of all token columns, and of the ends' values."""
        self.name_bytes = 0
        """Maximum bytes of uids, stop reasons and notes in the message's header, each with its length prefix."""
        self.routing: tuple[int, ...] | None = None
        """(layers, topk) of the routed experts, which must be the same for all steps of a message."""
        self.ends: list[TrajectoryEnd] = []
        self._steps: list[Step] = []

    def __len__(self) -> int:
        return len(self._steps) + len(self.ends)

    def append(self, step: Step) -> None:
        """Append a step."""
        self._steps.append(step)
        self.n_bytes += _REQUIRED_BYTES * (len(step.prompt_ids) + len(step.response_ids))
        optional = (getattr(step, name, None) for name in _OPTIONAL)
        self.n_bytes += sum(np.asarray(values).nbytes for values in optional if values is not None)
        if self.routing is None and step.routed_experts is not None:
            self.routing = step.routed_experts.shape[1:]
        self._count_names(step.prompt_uid, step.stop_reason, step.note)

    def end(self, end: TrajectoryEnd) -> None:
        """Append a trajectory's end."""
        self.ends.append(end)
        self.n_bytes += said_bytes(end)
        self._count_names(end.prompt_uid, end.stop_reason)

    async def accepted(self, trajectory: TrajectoryId) -> bool:
        """Always True: no buffer has to answer, because the steps are only collected here."""
        return True

    def by_trajectory(self) -> dict[TrajectoryId, StepColumns]:
        """The steps and the end of each trajectory separately, in order of first appearance."""
        parts: dict[TrajectoryId, StepColumns] = {}
        for step in self._steps:
            parts.setdefault(step.trajectory, StepColumns()).append(step)
        for end in self.ends:
            parts.setdefault(end.trajectory, StepColumns()).end(end)
        return parts

    def step_group(self, sender: Sender) -> StepGroup:
        """All steps and ends as one message."""
        return StepGroup(sender, self.steps(), ends_table(self.ends))

    def steps(self) -> Steps:
        """The steps as columns."""
        return steps_table(self._steps)

    def _count_names(self, *names: str) -> None:
        self.name_bytes += sum(len(name.encode()) + 5 for name in names)


def step_group(sender: Sender, steps: Iterable[Step], ends: Iterable[TrajectoryEnd]) -> StepGroup:
    """One message made of step and end objects."""
    return StepGroup(sender, steps_table(steps), ends_table(ends))


def steps_table(steps: Iterable[Step]) -> Steps:
    """A table of step objects; where a step lacks values for a column, the table has the column's fill value."""
    steps = list(steps)
    items = [_item_values(step) for step in steps]
    offsets_K = offsets_of(np.array([len(step.prompt_ids) + len(step.response_ids) for step in steps], np.int64))
    columns: dict[str, Any] = {
        column.name: _item_column(column, [item[column.name[:-2]] for item in items])
        for column in columns_of(Steps).items
        if column.about.compare != "names"
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
        "stop_reason": step.stop_reason, "note": step.note, "portable": step.portable or None,
        "temperature": step.temperature,
        "reward": step.reward, "has_logprobs": step.logprobs is not None, "prompt_length": len(step.prompt_ids),
        "extends": extends, "extends_length": length, "extends_digest": digest,
    }  # fmt: skip


def _item_column(column: Column, values: list[Any]) -> NDArray[Any] | None:
    if column.optional and all(value is None for value in values):
        return None
    return np.array([column.about.fill if value is None else value for value in values], column.dtype)


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
