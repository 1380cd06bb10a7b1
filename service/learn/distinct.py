"""The distinct tokens of rows: rows with a common prefix share its tokens.

    row 0   1 2 3 4          depth-first order   row 1   row 0   row 2        (`service.handoff.batches.pack`)
    row 1   1 2 3            shared with before      0       3       2
    row 2   1 2 7 8          new tokens          1 2 3       4     7 8

    slot_N      0 1 2 3 | 0 1 2 | 0 1 4 5        for each token of the rows, its number among the distinct tokens
    position_U  0 1 2 3 2 3                      the position of each distinct token in its rows

Axes: `R` rows, `N` their tokens, `U` distinct tokens, in depth-first order of the tree of prefixes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from service.handoff.batches.pack import PrefixOrder
from service.types import Int64s


class DistinctTokens(NamedTuple):
    """Positions of the distinct tokens of rows."""

    slot_N: Int64s
    """For each token of the rows, its number among the distinct tokens."""
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
        """The runs of the prefix tree, each with the range of tokens below it; a run ends where rows diverge.

        In the module's example: the run 0:2 has the tokens 2:6 below it; the runs 2:4 and 4:6 have none.
        """
        position_U, n_distinct = self.position_U, len(self.position_U)
        if not n_distinct:
            return []
        begins_U = np.flatnonzero(np.diff(position_U, prepend=-2) != 1)
        # the token with which an earlier row continued after this branching point
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
    """A run `start:stop` of distinct tokens, and its descendants, the tokens `stop:below`."""

    start: int
    stop: int
    below: int
