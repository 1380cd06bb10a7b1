"""Tables made of steps and ends as they happen, and the objects of the library made of tables.

StepColumns().append(...), .append(...), .end(...)  ->  step_group(sender)  ->  service.handoff.steps.wire.encode
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from service.columns import Column, codes_of, columns_of, concat, filled, lengths_of, offsets_of
from service.types import (
    Ends,
    Extension,
    Float32s,
    Int64s,
    Row,
    Rows,
    Sender,
    Step,
    StepGroup,
    Steps,
    TrajectoryEnd,
    TrajectoryId,
    check_token_ids,
)

NO_EXTENSION = Extension(-1, 0, 0)
"""The reference of a step that carries its whole prompt."""


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
        stop_reason: str = "stop",
        extends: Extension | None = None,
        **columns: ArrayLike | None,
    ) -> None:
        """Take a step; see `StepColumns.append`."""

    def end(self, end: TrajectoryEnd) -> None:
        """Take a trajectory's end."""


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
        """Bytes of all token columns."""
        self.name_bytes = 0
        """Bytes of uids and stop reasons in the message's header, with a length before each, at most."""
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
        stop_reason: str = "stop",
        extends: Extension | None = None,
        **columns: ArrayLike | None,
    ) -> None:
        """Append a step; the arguments are those of `service.types.Step`.

        `columns`: token columns by their name without `_N`, for the response's tokens (`logprobs`, `loss_mask`,
        `versions`) or for those of prompt and response (`routed_experts`). What is None or left out has the column's
        fill value.

        Raises:
            ValueError: an array is not as long as the tokens that it is about; an id that is no int32.
        """
        for name, ids in (("prompt_ids", prompt_ids), ("response_ids", response_ids)):
            check_token_ids(name, ids)
        prompt, response = np.asarray(prompt_ids, np.int32), np.asarray(response_ids, np.int32)
        tokens = {name: np.asarray(values) for name, values in columns.items() if values is not None}
        if np.ndim(reward):
            tokens["token_rewards"] = np.asarray(reward)
        self._check(tokens, len(prompt), len(response))
        tokens |= {"prompt_ids": prompt, "response_ids": response}
        group_id, sample, attempt = trajectory
        step, length, digest = extends or NO_EXTENSION
        self._add(
            {
                "group_id": group_id, "sample": sample, "attempt": attempt, "index": index, "uid": prompt_uid,
                "stop_reason": stop_reason, "temperature": temperature,
                "reward": float(np.sum(reward, dtype=np.float64)), "has_logprobs": "logprobs" in tokens,
                "prompt_length": len(prompt), "extends": step, "extends_length": length, "extends_digest": digest,
            },
            tokens,
        )  # fmt: skip

    def end(self, end: TrajectoryEnd) -> None:
        """Append a trajectory's end."""
        self.ends.append(end)
        self._count_names(end.prompt_uid, end.stop_reason)

    def by_trajectory(self) -> dict[TrajectoryId, StepColumns]:
        """The steps and the end of each trajectory by themselves, in order of first appearance."""
        parts: dict[TrajectoryId, StepColumns] = {}
        for item, tokens in zip(self._items, self._tokens, strict=True):
            of = TrajectoryId(item["group_id"], item["sample"], item["attempt"])
            parts.setdefault(of, StepColumns())._add(item, tokens)
        for end in self.ends:
            parts.setdefault(end.trajectory, StepColumns()).end(end)
        return parts

    def step_group(self, sender: Sender) -> StepGroup:
        """Everything as one message."""
        return StepGroup(sender, self.steps(), ends_table(self.ends))

    def steps(self) -> Steps:
        """The steps as columns."""
        lengths = [(len(tokens["prompt_ids"]), len(tokens["response_ids"])) for tokens in self._tokens]
        offsets_K = offsets_of(np.array([prompt + response for prompt, response in lengths], np.int64))
        columns: dict[str, Any] = {
            column.name: np.array([item[column.name[:-2]] for item in self._items], column.dtype)
            for column in columns_of(Steps).items
            if column.about.compare != "names"
        }
        uids, columns["uid_K"] = codes_of([item["uid"] for item in self._items])
        stop_reasons, columns["stop_reason_K"] = codes_of([item["stop_reason"] for item in self._items])
        prompt_stop_K = offsets_K[:-1] + columns["prompt_length_K"]
        bounds = list(zip(offsets_K[:-1].tolist(), prompt_stop_K.tolist(), offsets_K[1:].tolist(), strict=True))
        tokens: dict[str, Any] = {
            column.name: self._token_column(column, bounds) for column in columns_of(Steps).tokens
        }
        return Steps(uids=uids, stop_reasons=stop_reasons, offsets_K=offsets_K, **columns, **tokens)

    def _add(self, item: dict[str, Any], tokens: dict[str, NDArray[Any]]) -> None:
        self._items.append(item)
        self._tokens.append(tokens)
        self._count_names(item["uid"], item["stop_reason"])

    def _check(self, tokens: dict[str, NDArray[Any]], prompt: int, response: int) -> None:
        """Count the step's bytes; ValueError unless its arrays fit their tokens, and the other steps' arrays."""
        known = {column.name[:-2]: column for column in columns_of(Steps).tokens}
        if strange := tokens.keys() - known.keys():
            raise ValueError(f"{', '.join(sorted(strange))}: no token column of a step")
        for name, values in tokens.items():
            length = response + (prompt if known[name].about.on_prompt else 0)
            if len(values) != length:
                raise ValueError(f"{name} has {len(values)} items; its axis has {length}")
        self.n_bytes += sum(
            column.dtype.itemsize * (prompt + response) for column in known.values() if not column.optional
        )
        self.n_bytes += sum(tokens[name].nbytes for name in tokens if known[name].optional)
        if "routed_experts" in tokens:
            self.routing = self.routing or tokens["routed_experts"].shape[1:]

    def _count_names(self, *names: str) -> None:
        self.name_bytes += sum(len(name.encode()) + 5 for name in names)

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
        temperature=step.temperature, reward=step.reward, stop_reason=step.stop_reason, extends=step.extends,
        logprobs=step.logprobs, loss_mask=step.loss_mask, versions=step.versions,
        routed_experts=step.routed_experts,
    )  # fmt: skip


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
