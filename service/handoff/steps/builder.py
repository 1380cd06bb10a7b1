"""Builds messages: steps and trajectory ends are appended to columns as they happen.

    StepColumns().append(...), .append(...), .end(...)  ->  step_group(sender)  ->  service.handoff.steps.wire.encode

`Step` objects are the form of the library (docs/library.md); `steps_table` appends them the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from service.columns import Column, codes_of, columns_of, filled, offsets_of
from service.handoff.steps.tables import NO_EXTENSION, ends_table, said_bytes
from service.types import (
    Extension,
    Float32s,
    Sender,
    Step,
    StepGroup,
    Steps,
    TrajectoryEnd,
    TrajectoryId,
    as_token_ids,
)

_TOKEN_COLUMNS = {column.name[:-2]: column for column in columns_of(Steps).tokens}
_OPTIONAL = [name for name, column in _TOKEN_COLUMNS.items() if column.optional]
_REQUIRED_BYTES = sum(column.dtype.itemsize for column in _TOKEN_COLUMNS.values() if not column.optional)
"""Of one token."""


class StepSink(Protocol):
    """Takes the steps of trajectories, and their ends: a `StepColumns`, or a generator's outbox."""

    def append(
        self,
        trajectory: TrajectoryId,
        prompt_uid: str,
        index: int,
        prompt_ids: ArrayLike,
        response_ids: ArrayLike,
        *,
        temperature: float = 1.0,
        reward: float | Float32s = 0.0,
        score: float | None = None,
        stop_reason: str = "stop",
        extends: Extension | None = None,
        note: str = "",
        portable: bool = False,
        **columns: ArrayLike | None,
    ) -> None:
        """Take a step; see `StepColumns.append`."""

    def end(self, end: TrajectoryEnd) -> None:
        """Take a trajectory's end."""

    async def accepted(self, trajectory: TrajectoryId) -> bool:
        """Whether the last step of this trajectory counts; returns once that is certain."""


class StepColumns:
    """The steps and trajectory ends of one message, appended as they happen.

    >>> made = StepColumns()
    >>> sampled = {"logprobs": [-0.5, -0.25], "loss_mask": [True, True], "versions": [0, 0]}
    >>> made.append(TrajectoryId(7, 0), "a", 0, [10, 20, 30], [40, 50], **sampled)
    >>> steps = made.steps()
    >>> steps.token_ids_N.tolist(), steps.loss_mask_N.astype(int).tolist(), steps.prompt_length_K.tolist()
    ([10, 20, 30, 40, 50], [0, 0, 0, 1, 1], [3])
    """

    def __init__(self) -> None:
        self.n_bytes = 0
        """Bytes of all token columns, and of what ends say."""
        self.name_bytes = 0
        """Bytes of uids, stop reasons and notes in the message's header, with a length before each, at most."""
        self.routing: tuple[int, ...] | None = None
        """(layers, topk) of the routed experts; one message has one shape of them."""
        self.ends: list[TrajectoryEnd] = []
        self._items: list[dict[str, Any]] = []
        self._tokens: list[dict[str, NDArray[Any]]] = []

    def __len__(self) -> int:
        return len(self._items) + len(self.ends)

    def append(
        self,
        trajectory: TrajectoryId,
        prompt_uid: str,
        index: int,
        prompt_ids: ArrayLike,
        response_ids: ArrayLike,
        *,
        temperature: float = 1.0,
        reward: float | Float32s = 0.0,
        score: float | None = None,
        stop_reason: str = "stop",
        extends: Extension | None = None,
        note: str = "",
        portable: bool = False,
        **columns: ArrayLike | None,
    ) -> None:
        """Append a step; the arguments are those of `service.types.Step`.

        `columns`: token columns by their name without `_N`, for the response's tokens (`logprobs`, `loss_mask`,
        `versions`) or for those of prompt and response (`routed_experts`). Omitted columns and None get the column's
        fill value.

        Raises:
            ValueError: an array is not as long as the tokens that it is about; an id that is no int32.
        """
        prompt, response = as_token_ids("prompt_ids", prompt_ids), as_token_ids("response_ids", response_ids)
        tokens = {"prompt_ids": prompt, "response_ids": response}
        if isinstance(reward, np.ndarray) and reward.ndim:
            columns["token_rewards"], reward = reward, float(reward.sum(dtype=np.float64))
        for name, values in columns.items():
            if values is None:
                continue
            if (column := _TOKEN_COLUMNS.get(name)) is None or column.about.fill is None:  # a column, and not the ids
                raise ValueError(f"{name} is no token column of a step")
            tokens[name] = np.asarray(values)
            length = len(response) + (len(prompt) if column.about.on_prompt else 0)
            if len(tokens[name]) != length:
                raise ValueError(f"{name} has {len(tokens[name])} items; its axis has {length}")
        group_id, sample, attempt = trajectory
        step, length, digest = extends or NO_EXTENSION
        self._add(
            {
                "group_id": group_id, "sample": sample, "attempt": attempt, "index": index, "uid": prompt_uid,
                "stop_reason": stop_reason, "note": note, "portable": portable or None,
                "temperature": temperature, "reward": reward, "score": score,
                "has_logprobs": "logprobs" in tokens, "prompt_length": len(prompt),
                "extends": step, "extends_length": length, "extends_digest": digest,
            },
            tokens,
        )  # fmt: skip

    def end(self, end: TrajectoryEnd) -> None:
        """Append a trajectory's end."""
        self.ends.append(end)
        self.n_bytes += said_bytes(end)
        self._count_names(end.prompt_uid, end.stop_reason)

    async def accepted(self, trajectory: TrajectoryId) -> bool:
        """Return True: columns accept everything."""
        return True

    def by_trajectory(self) -> dict[TrajectoryId, StepColumns]:
        """The steps and the end of each trajectory separately, in order of first appearance."""
        parts: dict[TrajectoryId, StepColumns] = {}
        for item, tokens in zip(self._items, self._tokens, strict=True):
            of = TrajectoryId(item["group_id"], item["sample"], item["attempt"])
            parts.setdefault(of, StepColumns())._add(item, tokens)
        for end in self.ends:
            parts.setdefault(end.trajectory, StepColumns()).end(end)
        return parts

    def step_group(self, sender: Sender) -> StepGroup:
        """All steps and ends as one message."""
        return StepGroup(sender, self.steps(), ends_table(self.ends))

    def steps(self) -> Steps:
        """The steps as columns."""
        lengths = [(len(tokens["prompt_ids"]), len(tokens["response_ids"])) for tokens in self._tokens]
        offsets_K = offsets_of(np.array([prompt + response for prompt, response in lengths], np.int64))
        columns: dict[str, Any] = {
            column.name: self._item_column(column)
            for column in columns_of(Steps).items
            if column.about.compare != "names"
        }
        for names, code in columns_of(Steps).names:
            columns[names], columns[code] = codes_of([item[code[:-2]] for item in self._items])
        prompt_stop_K = offsets_K[:-1] + columns["prompt_length_K"]
        bounds = list(zip(offsets_K[:-1].tolist(), prompt_stop_K.tolist(), offsets_K[1:].tolist(), strict=True))
        tokens: dict[str, Any] = {
            column.name: self._token_column(column, bounds) for column in columns_of(Steps).tokens
        }
        return Steps(offsets_K=offsets_K, **columns, **tokens)

    def _add(self, item: dict[str, Any], tokens: dict[str, NDArray[Any]]) -> None:
        self._items.append(item)
        self._tokens.append(tokens)
        self.n_bytes += _REQUIRED_BYTES * (len(tokens["prompt_ids"]) + len(tokens["response_ids"]))
        self.n_bytes += sum(tokens[name].nbytes for name in _OPTIONAL if name in tokens)
        if self.routing is None and "routed_experts" in tokens:
            self.routing = tokens["routed_experts"].shape[1:]
        self._count_names(item["uid"], item["stop_reason"], item["note"])

    def _count_names(self, *names: str) -> None:
        self.name_bytes += sum(len(name.encode()) + 5 for name in names)

    def _item_column(self, column: Column) -> NDArray[Any] | None:
        values = [item[column.name[:-2]] for item in self._items]
        if column.optional and all(value is None for value in values):
            return None
        return np.array([column.about.fill if value is None else value for value in values], column.dtype)

    def _token_column(self, column: Column, bounds: list[tuple[int, int, int]]) -> NDArray[Any] | None:
        name, total = column.name[:-2], bounds[-1][-1] if bounds else 0
        known = [tokens[name] for tokens in self._tokens if name in tokens]
        if column.optional and not known:
            return None
        column_N = filled(column, total, known[0].shape[1:] if known else ())
        for tokens, item, (start, middle, stop) in zip(self._tokens, self._items, bounds, strict=True):
            if name == "token_ids":
                column_N[start:middle], column_N[middle:stop] = tokens["prompt_ids"], tokens["response_ids"]
            elif name in tokens:
                column_N[start if column.about.on_prompt else middle : stop] = tokens[name]
            elif name == "token_rewards" and stop > middle:
                column_N[stop - 1] = item["reward"]
        return column_N


def step_group(sender: Sender, steps: Iterable[Step], ends: Iterable[TrajectoryEnd]) -> StepGroup:
    """One message made of step and end objects."""
    return StepGroup(sender, steps_table(steps), ends_table(ends))


def steps_table(steps: Iterable[Step]) -> Steps:
    """Step objects as columns."""
    columns = StepColumns()
    for step in steps:
        append_step(columns, step)
    return columns.steps()


def append_step(sink: StepSink, step: Step) -> None:
    """Append a step object."""
    sink.append(
        step.trajectory, step.prompt_uid, step.index, step.prompt_ids, step.response_ids,
        temperature=step.temperature, reward=step.reward, score=step.score, stop_reason=step.stop_reason,
        extends=step.extends, logprobs=step.logprobs, loss_mask=step.loss_mask, versions=step.versions,
        routed_experts=step.routed_experts, note=step.note, portable=step.portable,
    )  # fmt: skip
