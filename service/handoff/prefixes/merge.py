"""Prefix-aware merge: the steps of a trajectory that continue one another become one row.

    step 0: prompt [10 20 30]                                  response [40 50]
    step 1: prompt (first 5 tokens of step 0) [60 70]          response [80 90]
    row   : prompt [10 20 30]  response [40 50 60 70 80 90]
                                  mask    1  1  0  0  1  1

A step continues an earlier step if it refers to the whole of that step; a step without a reference begins a row. If
each step continues the step before it, merging copies nothing and changes only offsets. If a trajectory branches, its
rows are built from segments of the token axis: live ones keep their loss, context is repeated without loss, so that
later tokens follow what the policy saw:

    step 0: prompt [1 2]                        response [3 4]      row 0: live [1 2 3 4]
    step 1: prompt (first 3 tokens of step 0)   response [9]        row 1: context [1 2 3] (of step 0), live [9]

Steps merge only if they have the same temperature, and if both or neither have log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from service.columns import changes, check_choice, columns_of, filled, lengths_of, offsets_of, segments_of
from service.handoff.prefixes.sharing import StepNode, StepTree, check_references, shared_form
from service.handoff.steps.tables import in_order, name_of, row_objects, steps_table, total_lengths
from service.types import Bools, Int64s, Row, Rows, Step, Steps

Mode = Literal["off", "linear", "tree"]


class MergedRows(NamedTuple):
    """The rows that a merge made, and counts of the steps and tokens before and after the merge."""

    rows: Rows
    first_R: Int64s
    """The first step of each row, as the position of the step in the merged table."""
    counts: dict[str, int]
    """Number of `steps`, also by outcome (`extended`, `forked`, `reset`), of `rows`, and of tokens before and after."""


class _Layout(NamedTuple):
    """Which segments [C] of the token axis make up which rows."""

    start_C: Int64s
    stop_C: Int64s
    live_C: Bools
    """False if the segment is only context for the segments after it."""
    row_C: Int64s
    """The first step of the segment's row, as its index in the table."""
    last_K: Int64s
    """[K] at the index of a row's first step, the index of the row's last step."""


def merge_steps(steps: Iterable[Step], mode: Mode = "linear") -> list[Row]:
    """Merge steps of any number of trajectories into rows, ordered by the trajectory's first appearance, then by step.
    A step may have its whole prompt (`sharing.shared_form` makes the reference) or a reference.

    Raises a ValueError for two prompts, a gap, a step that came twice, a wrong reference or an unknown `mode`.
    """
    if not (listed := list(steps)):
        return []
    return row_objects(merge(check_whole(steps_table(shared_form(listed))), mode).rows)


def merge(steps: Steps, mode: Mode = "linear") -> MergedRows:
    """Merge the steps of a table, in any order, into rows; raises a ValueError if a step came twice."""
    check_choice("mode", mode, Mode)
    return merge_in_order(*in_order(steps), mode)


def merge_in_order(steps: Steps, number_K: Int64s, mode: Mode, by_turn: bool = False) -> MergedRows:
    """Merge steps sorted by trajectory (`number_K`) and index; `by_turn`: record `Rows.turn_N`."""
    counts = dict.fromkeys(("extended", "forked", "reset"), 0)
    layout = _layout(steps, number_K, mode, counts)
    begin_R = np.flatnonzero(np.diff(layout.row_C, prepend=-1))
    rows = _rows(steps, layout, begin_R)
    if by_turn:
        item_C = _items_of_segments(steps, layout).astype(np.int32)
        rows = replace(rows, turn_N=np.repeat(item_C, layout.stop_C - layout.start_C))
    counts |= {"steps": len(steps), "rows": len(rows)}
    counts |= {"tokens_before": int(total_lengths(steps).sum()), "tokens_after": len(rows.token_ids_N)}
    return MergedRows(rows, layout.row_C[begin_R], counts)


def check_whole(steps: Steps) -> Steps:
    """The steps in order; raises a ValueError for two prompts, a gap, a step that came twice, or a wrong reference."""
    steps, number_K = in_order(steps)
    start_K = np.maximum.accumulate(np.where(changes(number_K), np.arange(len(steps)), 0))
    for k in np.flatnonzero(steps.uid_K != steps.uid_K[start_K])[:1].tolist():
        one, other = steps.uids[steps.uid_K[start_K[k]]], steps.uids[steps.uid_K[k]]
        raise ValueError(f"{name_of(steps, k)} is of prompt {other!r}, but its trajectory began with {one!r}")
    for k in np.flatnonzero(steps.index_K != np.arange(len(steps)) - start_K)[:1].tolist():
        raise ValueError(f"{name_of(steps, k)} is there, but step {k - start_K[k]} before it is not")
    for items in np.split(np.arange(len(steps)), np.flatnonzero(changes(number_K))[1:]):
        check_references((steps, k) for k in items.tolist())
    return steps


def _layout(steps: Steps, number_K: Int64s, mode: Mode, counts: dict[str, int]) -> _Layout:
    first_K, item_K = changes(number_K), np.arange(len(steps))
    begins_K = first_K | (mode == "off")
    same_kind_K = begins_K | ~changes(steps.temperature_K, steps.has_logprobs_K)
    chained_K = _chained(steps, number_K, begins_K, same_kind_K)
    chain_C = item_K[chained_K]
    row_C = np.maximum.accumulate(np.where(begins_K, item_K, 0))[chained_K]
    last_K = item_K.copy()
    last_K[row_C] = chain_C  # these ascend, so the row's last step stays
    counts["extended"] += int(np.count_nonzero(chained_K & ~begins_K))
    start_C, stop_C = steps.offsets_K[chain_C], steps.offsets_K[chain_C + 1]
    segments = [(start_C, stop_C, np.ones(len(chain_C), np.bool_), row_C)]
    for first in np.flatnonzero(first_K & ~chained_K).tolist():
        builder = _RowBuilder(steps, mode, counts)
        for k in range(first, int(np.searchsorted(number_K, number_K[first], "right"))):
            builder.add(k)
        for row in builder.rows:
            last_K[row.steps[0]] = row.steps[-1]
            start_C, stop_C, live_C = np.array(row.segments, np.int64).reshape(-1, 3).T
            segments.append((start_C, stop_C, live_C.astype(np.bool_), np.full(len(start_C), row.steps[0], np.int64)))
    if len(segments) == 1:
        return _Layout(*segments[0], last_K)
    start_C, stop_C, live_C, row_C = (np.concatenate(columns) for columns in zip(*segments, strict=True))
    order = np.argsort(row_C, kind="stable")
    return _Layout(start_C[order], stop_C[order], live_C[order], row_C[order], last_K)


def _chained(steps: Steps, number_K: Int64s, begins_K: Bools, same_kind_K: Bools) -> Bools:
    """[K] whether every step of the step's trajectory begins a row or continues the whole step before it."""
    index_before_K = np.where(begins_K, -1, np.roll(steps.index_K, 1))
    before_K = np.where(begins_K, 0, np.roll(total_lengths(steps), 1))
    refers_K = same_kind_K & (steps.extends_K == index_before_K) & (steps.extends_length_K == before_K)
    return np.asarray((np.bincount(number_K, ~refers_K) == 0)[number_K])


def _rows(steps: Steps, layout: _Layout, begin_R: Int64s) -> Rows:
    length_C, first_R = layout.stop_C - layout.start_C, layout.row_C[begin_R]
    last_R = layout.last_K[first_R]
    prompt_length_K = total_lengths(steps) - lengths_of(steps.offsets_K) + steps.prompt_length_K
    offsets_R = offsets_of(np.add.reduceat(length_C, begin_R) if len(begin_R) else length_C)
    columns = segments_of(steps, columns_of(Steps).tokens, layout.start_C, layout.stop_C)
    if not layout.live_C.all():  # a context token keeps its id, routed experts and support; it has no loss
        _fill(columns, np.repeat(~layout.live_C, length_C), on_prompt=False)
    if any(column.about.on_prompt and columns[column.name] is not None for column in _FILLED):
        _fill(columns, _observed(steps, layout), on_prompt=True)
    return Rows(
        uids=steps.uids,
        stop_reasons=steps.stop_reasons,
        group_id_R=steps.group_id_K[first_R],
        sample_R=steps.sample_K[first_R],
        attempt_R=steps.attempt_K[first_R],
        uid_R=steps.uid_K[first_R],
        stop_reason_R=steps.stop_reason_K[last_R],
        first_step_R=steps.index_K[first_R],
        last_step_R=steps.index_K[last_R],
        temperature_R=steps.temperature_K[first_R],
        has_logprobs_R=steps.has_logprobs_K[first_R],
        prompt_length_R=prompt_length_K[first_R].astype(np.int32),
        offsets_R=offsets_R,
        reward_R=steps.reward_K[last_R],
        **columns,
    )


_FILLED = tuple(column for column in columns_of(Rows).tokens if column.about.fill is not None)


def _observed(steps: Steps, layout: _Layout) -> Bools:
    """[N] whether a token of a row is a prompt token between two responses."""
    item_C = _items_of_segments(steps, layout)
    length_C = layout.stop_C - layout.start_C
    observed_C = np.clip(steps.offsets_K[item_C] + steps.prompt_length_K[item_C] - layout.start_C, 0, length_C)
    observed_C[(item_C == layout.row_C) | ~layout.live_C] = 0
    lengths = np.stack((observed_C, length_C - observed_C), axis=1).reshape(-1)
    return np.repeat(np.tile([True, False], len(observed_C)), lengths)


def _items_of_segments(steps: Steps, layout: _Layout) -> Int64s:
    """[C] the step that owns each segment's tokens."""
    return np.searchsorted(steps.offsets_K, layout.start_C, "right") - 1


def _fill(columns: dict[str, Any], where_N: Bools, on_prompt: bool) -> None:
    """Set tokens to the fill value, in the columns that have values for prompt tokens or in the others."""
    for column in _FILLED:
        if column.about.on_prompt == on_prompt and (array := columns[column.name]) is not None:
            chosen = where_N.reshape(-1, *(1,) * (array.ndim - 1))
            columns[column.name] = np.where(chosen, filled(column, 1)[0].astype(array.dtype), array)


# -- trajectories that branch -----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _OpenRow:
    """A row that may still grow; its tokens are the prompt and response of its last step."""

    kind: tuple[float, bool]
    """Temperature, and whether there are log-probabilities: both are equal for all steps of a row."""
    tip: StepNode
    """The row's last step."""
    steps: list[int] = field(default_factory=list)
    """The positions of the row's steps in the table, in order."""
    segments: list[tuple[int, int, bool]] = field(default_factory=list)
    """(start, stop, live) of each segment of the row, on the steps' token axis."""


class _RowBuilder:
    """The rows of one trajectory, built step by step; `counts` are the numbers of steps by outcome, updated here."""

    def __init__(self, steps: Steps, mode: Mode, counts: dict[str, int]) -> None:
        self.rows: list[_OpenRow] = []
        self._steps, self._mode, self._counts = steps, mode, counts
        self._tree = StepTree()
        self._row_of: dict[int, _OpenRow] = {}
        """The row of each step, by step index."""
        self._sampled_from: dict[int, int] = {}
        """By step index, the position of the earliest sampled token in the step's prompt and response."""

    def add(self, k: int) -> None:
        """Add item `k`; steps must be added in order."""
        steps, step = self._steps, self._tree.add(self._steps, k)
        kind = float(steps.temperature_K[k]), bool(steps.has_logprobs_K[k])
        row, length, parent = self._continued(step, kind), 0, step.parent
        sampled_from = step.cut if parent is None else self._sampled_from[parent.index]
        is_fork = sampled_from < step.cut  # the prompt has tokens of an earlier response
        own_response = step.cut + int(steps.prompt_length_K[k])
        self._sampled_from[step.index] = sampled_from if is_fork else own_response
        if row is not None:
            self._counts["extended"] += 1
            length, row.tip = row.tip.length, step
        else:
            if self.rows and self._mode != "off":
                self._counts["forked" if is_fork else "reset"] += 1
            row = _OpenRow(kind, step)
            self.rows.append(row)
        # the step's tokens after the first `length`, which the row already has
        row.segments += [(*each, each[0] >= step.own_start) for each in step.segments(length, step.length)]
        row.steps.append(k)
        self._row_of[step.index] = row

    def _continued(self, step: StepNode, kind: tuple[float, bool]) -> _OpenRow | None:
        """The row whose tokens a step's prompt begins with: the longest one with `tree`, the newest with `linear`."""
        while (extended := step.parent) is not None and self._mode != "off":
            row, is_whole = self._row_of[extended.index], step.cut == extended.length
            if row.tip is extended and is_whole and row.kind == kind and (self._mode == "tree" or row is self.rows[-1]):
                return row
            step = extended
        return None
