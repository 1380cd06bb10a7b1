"""Packing: distributes rows over ranks and micro-batches.

All rows of a trajectory go to one rank. Every rank gets the same number of micro-batches, some of them dummies. Each
micro-batch fits the token budget, or is one longer row. In the padded layout its tokens are rows x longest row.

    trajectories of 6 5 4 3 tokens, 2 ranks, budget 6   ->   rank 0: [6] [3]     rank 1: [5] [4]

Where rows share prefixes, the cost of a rank or of a micro-batch is the number of its distinct tokens. The rows are
sorted by their tokens (depth-first order), and each row may share a prefix with the row before it:

    row 0   1 2 3 4          rows in sorted order                row 1   row 0   row 2
    row 1   1 2 3            tokens shared with the row before       0       3       2
    row 2   1 2 7 8          new tokens                          1 2 3       4     7 8

All rows of a prompt go to one rank. If that leaves ranks unequal, the prompt's trajectories are divided into 2, 4,
8, ... parts, as long as this makes the heaviest rank lighter; each further part computes the prompt once more.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.columns import Column, changes, columns_of, filled, lengths_of, nested_offsets
from service.handoff.prefixes.sharing import common_prefix
from service.types import Experts, Int32s, Int64s, MicroBatch, Rows, TrainedTokens

Layout = Literal["auto", "packed", "padded", "shared_prefix"]

BALANCED = 1.005
"""Balancing stops when the highest cost of a rank is at most this many times the lowest possible cost."""
WORTH_SHARING = 0.1
"""Fraction of a mini-batch's tokens that sharing must save for `layout: auto`."""
MIN_SHARED, MIN_FRACTION = 16, 0.1
"""Minimum length of a common prefix, in tokens and as a fraction of a row; sharing a shorter prefix saves no time."""


class Placement(NamedTuple):
    """The rows of each micro-batch of each rank, as row numbers; a micro-batch without rows is a dummy."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    imbalance: float
    """Cost of the rank with the highest cost, divided by the mean cost of a rank."""

    @property
    def row_R(self) -> Int64s:
        """[R] the row numbers in packing order: rank by rank, and micro-batch by micro-batch."""
        return np.array([row for rank in self.ranks for rows in rank for row in rows], np.int64)


def choose_placement(
    rows: Rows, trajectory_R: Int32s, prompt_G: Int32s, ranks: int, budget: int, layout: Layout
) -> tuple[Placement, dict[str, float]]:
    """The placement of rows for a layout; and, if this layout may share prefixes, metrics of the shared prefixes."""
    length_R = lengths_of(rows.offsets_R)
    if layout in ("packed", "padded"):
        return place(length_R, trajectory_R, ranks, budget, layout), {}
    order = prefix_order(rows.token_ids_N, rows.offsets_R, rows.routed_experts_N)
    total = max(int(length_R.sum()), 1)
    distinct = 1 - int(order.shared_R.sum()) / total
    if layout == "auto" and 1 - distinct < WORTH_SHARING:
        return place(length_R, trajectory_R, ranks, budget), {"generate/batch_distinct_ratio": distinct}
    placement = place_sharing(order, length_R, trajectory_R, prompt_G, ranks, budget)
    counts = [len(of_micro) for rank in placement.ranks for of_micro in rank]
    micro_batch_R = np.empty(len(length_R), np.int64)
    micro_batch_R[placement.row_R] = np.repeat(np.arange(len(counts)), counts)
    computed = 1 - int(order.within(micro_batch_R).shared_R.sum()) / total
    return placement, {"generate/batch_distinct_ratio": distinct, "generate/batch_computed_ratio": computed}


def place(length_R: Int64s, trajectory_R: Int32s, ranks: int, budget: int, layout: Layout = "packed") -> Placement:
    """Distribute rows over ranks and micro-batches; the estimated cost of a row is its number of tokens.

    >>> place(np.array([6, 5, 4, 3]), np.arange(4, dtype=np.int32), ranks=2, budget=6).ranks
    (((0,), (3,)), ((1,), (2,)))
    """
    apart = PrefixOrder(np.arange(len(length_R)), np.zeros(len(length_R), np.int64))
    prompt_G = np.arange(int(trajectory_R.max(initial=-1)) + 1, dtype=np.int32)  # one prompt per trajectory
    return place_sharing(apart, length_R, trajectory_R, prompt_G, ranks, budget, layout)


def in_bins(costs_of_rank: Sequence[Sequence[int]], budget: int, layout: Layout) -> list[list[list[int]]]:
    """The bins of each rank, as positions in the rank's costs; each rank has the same number of bins within the budget.
    Bins have similar costs if that keeps the budget; otherwise they are as few as possible, and the rest is empty."""
    few = [best_fit(costs, budget, layout) for costs in costs_of_rank]
    count, found = max(1, *map(len, few)), []
    for costs, bins in zip(costs_of_rank, few, strict=True):
        bin_of_row = _heaviest_first(np.array(costs, np.int64), count)
        alike = [np.flatnonzero(bin_of_row == b).tolist() for b in range(count)]
        taken = [[costs[row] for row in rows] for rows in alike]
        sizes = [len(of) * max(of, default=0) if layout == "padded" else sum(of) for of in taken]
        fit = all(size <= budget or len(rows) == 1 for size, rows in zip(sizes, alike, strict=True))
        found.append(alike if fit else bins + [[] for _ in range(count - len(bins))])
    return found


def partition(cost_G: Int64s, parts: int) -> Int64s:
    """[G] the part of each item, so that parts have similar costs: the better result of two heuristics.

    >>> partition(np.array([8, 7, 6, 5, 4]), 2).tolist()  # costs 8 + 6 and 7 + 5 + 4
    [1, 0, 1, 0, 0]
    """
    if parts == 1 or not len(cost_G):
        return np.zeros(len(cost_G), np.int64)
    found = [_heaviest_first(cost_G, parts)]
    best = max(float(cost_G.sum()) / parts, float(cost_G.max()))
    if _heaviest(cost_G, found[0], parts) > BALANCED * best:
        found.append(_largest_differencing(cost_G, parts))
    return min(found, key=lambda part_G: _heaviest(cost_G, part_G, parts))


def _heaviest(cost_G: Int64s, part_G: Int64s, parts: int) -> float:
    return float(np.bincount(part_G, cost_G, minlength=parts).max())


def _heaviest_first(cost_G: Int64s, parts: int) -> Int64s:
    loads, part_G = [(0, part) for part in range(parts)], np.zeros(len(cost_G), np.int64)
    costs = cost_G.tolist()
    for g in np.argsort(-cost_G, kind="stable").tolist():
        load, part = loads[0]
        part_G[g] = part
        heapq.heapreplace(loads, (load + costs[g], part))
    return part_G


def _largest_differencing(cost_G: Int64s, parts: int) -> Int64s:
    """Karmarkar-Karp: repeatedly join the two most unequal partial partitions, heaviest part with lightest part."""
    heap = [(-cost, g, [(cost, [g]), *[(0, list[int]())] * (parts - 1)]) for g, cost in enumerate(cost_G.tolist())]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        joined = [(x + y, [*items_a, *items_b]) for (x, items_a), (y, items_b) in zip(a, reversed(b), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], tie, joined))
    part_G = np.zeros(len(cost_G), np.int64)
    for part, (_, items) in enumerate(heap[0][2]):
        part_G[items] = part
    return part_G


def best_fit(lengths: Sequence[int], budget: int, layout: Layout) -> list[list[int]]:
    """Pack rows into few bins within the budget: longest first, into the fullest bin that has room.

    >>> best_fit([6, 5, 5, 4], 10, "packed")
    [[0, 3], [1, 2]]
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        size = lengths[row] if layout != "padded" or not bins else lengths[bins[-1][0]]  # a bin's longest row
        fullest = bisect_left(room, (size, -1))
        if fullest < len(room):
            left, b = room.pop(fullest)
        else:
            if layout == "padded":
                room.clear()  # no older bin has room for one more row of its width
            left, b, size = budget, len(bins), lengths[row]
            bins.append([])
        bins[b].append(row)
        insort(room, (left - size, b))
    return bins


def micro_batches(
    rows: Rows, staleness_N: Int32s, trajectory_R: Int32s, placement: Placement
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Cut the micro-batches of every rank, as views, from rows in packing order."""
    columns = [column for column in columns_of(TrainedTokens).tokens if getattr(rows, column.name) is not None]
    ranks, stop = [], 0
    at_N = None if rows.support_size_N is None else nested_offsets(rows.support_size_N)
    for rank in placement.ranks:
        batches = []
        for chosen in rank:
            start, stop = stop, stop + len(chosen)
            if not chosen:
                batches.append(_dummy(rows, columns))
                continue
            first, last = int(rows.offsets_R[start]), int(rows.offsets_R[stop])
            batch = MicroBatch(
                offsets_R=rows.offsets_R[start : stop + 1] - first,
                staleness_N=staleness_N[first:last],
                temperature_R=rows.temperature_R[start:stop],
                trajectory_of_row_R=trajectory_R[start:stop],
                turn_N=None if rows.turn_N is None else rows.turn_N[first:last],
                support_U=None if at_N is None or rows.support_U is None else rows.support_U[at_N[first] : at_N[last]],
                **{column.name: getattr(rows, column.name)[first:last] for column in columns},
            )
            batches.append(batch)
        ranks.append(tuple(batches))
    return tuple(ranks)


def _dummy(rows: Rows, columns: Sequence[Column]) -> MicroBatch:
    """A micro-batch of two tokens without loss, so that every rank makes the same number of forward passes."""
    tokens: dict[str, Any] = {c.name: filled(c, 2, getattr(rows, c.name)) for c in columns}
    return MicroBatch(
        offsets_R=np.array([0, 2], np.int64),
        staleness_N=np.full(2, -1, np.int32),
        temperature_R=np.ones(1, np.float32),
        trajectory_of_row_R=np.full(1, -1, np.int32),
        support_U=None if rows.support_U is None else rows.support_U[:0],
        **tokens,
    )


# -- shared prefixes --------------------------------------------------------------------------------------------------


def place_sharing(
    order: PrefixOrder,
    length_R: Int64s,
    trajectory_R: Int32s,
    prompt_G: Int32s,
    ranks: int,
    budget: int,
    layout: Layout = "shared_prefix",
) -> Placement:
    """Distribute rows over ranks and micro-batches so that rows with a common prefix are adjacent."""
    part_R = _ranks_of_rows(order, length_R, trajectory_R, prompt_G, ranks)
    order = order.within(part_R)
    places = [np.flatnonzero(part_R[order.row_R] == rank) for rank in range(ranks)]
    parts = [list(_parts(order, of_rank, length_R, budget)) for of_rank in places]
    bins = in_bins([[cost for _, cost in of_rank] for of_rank in parts], budget, layout)
    placed = tuple(
        tuple(tuple(row for part in chosen for row in of_rank[part][0]) for chosen in of_bins)
        for of_rank, of_bins in zip(parts, bins, strict=True)
    )
    loads = distinct_of_parts(order, length_R, part_R, ranks)
    return Placement(placed, float(loads.max() / max(loads.mean(), 1)))


def distinct_of_parts(order: PrefixOrder, length_R: Int64s, part_R: Int64s, parts: int) -> Int64s:
    """The number of distinct tokens of each part; tokens of a shared prefix count once. `part_R`: each row's part."""
    order = order.within(part_R)
    return np.bincount(part_R[order.row_R], length_R[order.row_R] - order.shared_R, minlength=parts).astype(np.int64)


def _ranks_of_rows(order: PrefixOrder, length_R: Int64s, trajectory_R: Int32s, prompt_G: Int32s, ranks: int) -> Int64s:
    if ranks == 1:
        return np.zeros(len(length_R), np.int64)
    enough = BALANCED * float(length_R.sum() - order.shared_R.sum()) / ranks

    def dealt(unit_G: Int64s) -> Int64s:
        unit_R = unit_G[trajectory_R]
        return partition(distinct_of_parts(order, length_R, unit_R, int(unit_G.max(initial=0)) + 1), ranks)[unit_R]

    def heaviest(part_R: Int64s) -> float:
        return max(float(distinct_of_parts(order, length_R, part_R, ranks).max()), enough)

    return min(map(dealt, _units(order, trajectory_R, prompt_G)), key=heaviest)


def _units(order: PrefixOrder, trajectory_R: Int32s, prompt_G: Int32s) -> Iterator[Int64s]:
    """Yield [G] the unit of each trajectory: units are whole prompts, then halves, ..., at last single trajectories."""
    first_G = np.full(len(prompt_G), len(trajectory_R))
    np.minimum.at(first_G, trajectory_R[order.row_R], np.arange(len(trajectory_R)))
    by_prompt = np.lexsort((first_G, prompt_G))  # common prefixes are adjacent
    size_P = np.bincount(prompt_G)
    number_G = np.empty(len(prompt_G), np.int64)
    number_G[by_prompt] = np.arange(len(prompt_G)) - np.repeat(np.cumsum(size_P) - size_P, size_P)
    max_parts = int(size_P.max(initial=1))
    for power in range((max_parts - 1).bit_length() + 1):
        of_prompt_G = number_G * min(1 << power, max_parts) // size_P[prompt_G]
        yield np.unique(prompt_G.astype(np.int64) * max_parts + of_prompt_G, return_inverse=True)[1]


def _parts(order: PrefixOrder, places: Int64s, length_R: Int64s, budget: int) -> Iterator[tuple[list[int], int]]:
    """Yield adjacent rows that share prefixes and fit the budget, each with its number of distinct tokens."""
    rows: list[int] = []
    cost = 0
    for row, shared in zip(order.row_R[places].tolist(), order.shared_R[places].tolist(), strict=True):
        length = int(length_R[row])
        if rows and (not shared or cost + length - shared > budget):
            yield rows, cost
            rows = []
        cost = cost + length - shared if rows else length
        rows.append(row)
    if rows:
        yield rows, cost


class PrefixOrder(NamedTuple):
    """An order of rows in which rows with a common prefix are adjacent."""

    row_R: Int64s
    """The row numbers, in this order."""
    shared_R: Int64s
    """The number of leading tokens that each row shares with the row before it in this order."""

    def within(self, part_R: Int64s) -> PrefixOrder:
        """This order, sorted by the part of each row; rows of different parts count as sharing nothing."""
        order_R = np.argsort(part_R[self.row_R], kind="stable")
        row_R, shared_R = self.row_R[order_R], np.zeros_like(self.shared_R)
        # the shared prefix of two rows is the minimum over the adjacent pairs between them
        bounds = np.stack((order_R[:-1], order_R[1:]), axis=1).reshape(-1) + 1
        between_R = np.minimum.reduceat(np.append(self.shared_R, 0), bounds)[::2]
        shared_R[1:] = np.where(changes(part_R[row_R])[1:], 0, between_R)
        return PrefixOrder(row_R, shared_R)


def prefix_order(
    token_ids_N: Int32s,
    offsets_R: Int64s,
    routed_experts_N: Experts | None = None,
    least: int = MIN_SHARED,
    fraction: float = MIN_FRACTION,
) -> PrefixOrder:
    """Sort rows by their tokens and routed experts; makes a copy of both. `least`, `fraction`: see `MIN_SHARED`."""
    record_N: NDArray[Any] = token_ids_N
    if routed_experts_N is not None:
        experts_N = routed_experts_N.reshape(len(token_ids_N), math.prod(routed_experts_N.shape[1:]))
        bytes_N = np.concatenate([part.view(np.uint8) for part in (token_ids_N[:, None], experts_N)], axis=1)
        record_N = bytes_N.view(f"V{bytes_N.shape[1]}")[:, 0]
    rows = [record_N[start:stop] for start, stop in pairwise(offsets_R.tolist())]
    order = sorted(range(len(rows)), key=[row.tobytes() for row in rows].__getitem__)
    shared_R = np.zeros(len(rows), np.int64)
    for place, (before, row) in enumerate(pairwise(order), 1):
        shared = common_prefix(rows[before], rows[row])
        shared_R[place] = shared if shared >= max(least, fraction * len(rows[row])) else 0
    return PrefixOrder(np.array(order, np.int64), shared_R)
