"""The distinct tokens of rows: rows that begin alike share the tokens of what they have in common.

    row 0   1 2 3 4          depth-first order   row 1   row 0   row 2
    row 1   1 2 3            shared with before      0       3       2
    row 2   1 2 7 8          new tokens          1 2 3       4     7 8

    slot_N      0 1 2 3 | 0 1 2 | 0 1 4 5        where each token of the rows lies among the distinct ones
    position_U  0 1 2 3 2 3                      the position of each distinct token in its rows

Axes: `R` rows, `N` their tokens, `U` distinct tokens, in depth-first order of the tree of prefixes.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.types import Int16s, Int32s, Int64s

Uint8s = NDArray[np.uint8]

MIN_SHARED, MIN_FRACTION = 16, 0.1
"""Tokens of a common beginning, and fraction of a row, below which rows share nothing: it would not save time."""


class PrefixOrder(NamedTuple):
    """Rows in an order in which those that begin alike stand together."""

    row_R: Int64s
    """The rows, in this order."""
    shared_R: Int64s
    """Leading tokens that each has in common with the one before it, in this order."""

    def within(self, part_R: Int64s) -> PrefixOrder:
        """The same rows, part by part; rows of different parts share nothing. `part_R`: the part of each row."""
        order_R = np.argsort(part_R[self.row_R], kind="stable")
        shared_R = np.zeros_like(self.shared_R)
        if len(order_R) > 1:
            same_R = np.diff(part_R[self.row_R[order_R]]) == 0
            # what two rows share is the least of what neighbours between them share
            shared_R[1:] = np.where(same_R, _least_between(self.shared_R, order_R[:-1] + 1, order_R[1:]), 0)
        return PrefixOrder(self.row_R[order_R], shared_R)


def _least_between(values: Int64s, first: Int64s, last: Int64s) -> Int64s:
    """The least of `values[first..last]`, of each pair; any number where `last < first`."""
    levels, span = [values], 1
    while 2 * span <= len(values):
        below = levels[-1]
        levels.append(np.minimum(below[:-span], below[span:]))
        span *= 2
    found = np.zeros_like(first)
    level_of_pair = np.log2(np.maximum(last - first + 1, 1)).astype(np.int64)
    for level, least in enumerate(levels):
        chosen = np.flatnonzero((level_of_pair == level) & (last >= first))
        found[chosen] = np.minimum(least[first[chosen]], least[last[chosen] - (1 << level) + 1])
    return found


def prefix_order(
    token_ids_N: Int32s,
    offsets_R: Int64s,
    routed_experts_N: Int16s | None = None,
    least: int = MIN_SHARED,
    fraction: float = MIN_FRACTION,
) -> PrefixOrder:
    """The rows by their tokens; where experts are recorded, tokens with other experts count as other tokens.

    Takes memory for a copy of both arrays.
    """
    record_N = _as_bytes(token_ids_N)
    if routed_experts_N is not None:
        record_N = np.concatenate([record_N, _as_bytes(routed_experts_N)], axis=1)
    bounds = offsets_R.tolist()
    rows = [record_N[start:stop].tobytes() for start, stop in pairwise(bounds)]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    shared_R = np.zeros(len(rows), np.int64)
    for place in range(1, len(order)):
        before, row = (record_N[bounds[r] : bounds[r + 1]] for r in (order[place - 1], order[place]))
        shared = _common(before, row)
        shared_R[place] = shared if shared >= max(least, fraction * len(row)) else 0
    return PrefixOrder(np.array(order, np.int64), shared_R)


def _as_bytes(values_N: NDArray[Any]) -> Uint8s:
    """[N, ...] -> [N, bytes]"""
    width = math.prod(values_N.shape[1:])
    return np.ascontiguousarray(values_N).reshape(len(values_N), width).view(np.uint8)


def _common(before: Uint8s, row: Uint8s) -> int:
    """The number of leading tokens that two rows have in common."""
    shortest = min(len(before), len(row))
    differs = before[:shortest].reshape(-1) != row[:shortest].reshape(-1)
    first = int(differs.argmax()) if len(differs) else 0
    return first // row.shape[1] if len(differs) and differs[first] else shortest


class DistinctTokens(NamedTuple):
    """Where the distinct tokens of rows lie."""

    slot_N: Int64s
    """The distinct token that each token of the rows is."""
    position_U: Int64s

    @staticmethod
    def of(order: PrefixOrder, offsets_R: Int64s) -> DistinctTokens:
        """Number the distinct tokens in the order of the rows."""
        slot_N, positions = np.zeros(int(offsets_R[-1]), np.int64), [np.zeros(0, np.int64)]
        path, end = slot_N[:0], 0
        for row, shared in zip(order.row_R.tolist(), order.shared_R.tolist(), strict=True):
            start, stop = int(offsets_R[row]), int(offsets_R[row + 1])
            new = stop - start - shared
            slot_N[start : start + shared] = path[:shared]
            slot_N[start + shared : stop] = np.arange(end, end + new)
            positions.append(np.arange(shared, stop - start))
            path, end = slot_N[start:stop], end + new
        return DistinctTokens(slot_N, np.concatenate(positions))

    def branches(self) -> list[Branch]:
        """The runs of the tree, each with the tokens below it; a run ends where rows part.

        In the module's example 0:2 with 2:6 below it, 2:4 and 4:6 with nothing.
        """
        position_U, n_distinct = self.position_U, len(self.position_U)
        if not n_distinct:
            return []
        begins_U = np.flatnonzero(np.diff(position_U, prepend=-2) != 1)
        # the token at which an earlier row went on where this one branches off
        order_U = np.lexsort((np.arange(n_distinct), position_U))
        place_U = np.empty(n_distinct, np.int64)
        place_U[order_U] = np.arange(n_distinct)
        others = order_U[np.maximum(place_U[begins_U] - 1, 0)]
        cuts = np.unique(np.concatenate([begins_U, others[position_U[others] == position_U[begins_U]]]))
        stops = [*cuts[1:].tolist(), n_distinct]
        below = np.full(len(cuts), n_distinct)
        open_cuts: list[int] = []
        for number, cut in enumerate(cuts.tolist()):
            while open_cuts and position_U[cut] <= position_U[cuts[open_cuts[-1]]]:
                below[open_cuts.pop()] = cut
            open_cuts.append(number)
        return [Branch(*run) for run in zip(cuts.tolist(), stops, below.tolist(), strict=True)]


class Branch(NamedTuple):
    """A run `start:stop` of distinct tokens, which all tokens `stop:below` follow."""

    start: int
    stop: int
    below: int
