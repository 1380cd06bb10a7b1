"""Layout of attention: how it is computed for rows on one token axis, with or without shared prefixes.

Axes: `N` tokens of the rows, `S` slots of the model's input (fewer than `N` where rows share a prefix), `B` tokens of
a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.learn.chunk_layout import Chunks
from service.learn.distinct import Branch, DistinctTokens
from service.types import Int64s

CALL_COST = 256 * 256
"""Entries of an attention matrix that take about as much time as one more call of the attention kernel."""
LONG_RUN = 64
"""Length from which a run of the prefix tree has its own kernel call on CPU; copying it to a bucket would be slower."""


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of an array on the device; the host does not wait for the transfer."""
    # a copy, because arrays from shared memory are read-only, which torch does not support
    host = torch.from_numpy(array.copy())
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def positions_in_rows(lengths_R: Int64s) -> Int64s:
    """[N] the position of each packed token in its row: lengths 3 2 -> 0 1 2 0 1."""
    starts_R = np.cumsum(lengths_R) - lengths_R
    return np.arange(lengths_R.sum()) - np.repeat(starts_R, lengths_R)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows of similar length, padded to lines of one width, which one call of the attention kernel computes."""

    rows: int
    width: int
    token_B: Tensor | None
    """Index of the bucket's tokens on the packed axis; None if they are all tokens, in order."""
    slot_B: Tensor
    """Position of each of the bucket's tokens among its `rows * width` slots."""

    @staticmethod
    def of(bounds: Int64s, rows: Int64s, device: torch.device) -> Bucket:
        """A bucket of some of the rows with these bounds; `token_B` is None if `rows` lists all of them, in order."""
        lengths_R = np.diff(bounds)[rows]
        width = int(lengths_R.max())
        position_B = positions_in_rows(lengths_R)
        slot_B = np.repeat(np.arange(len(rows)) * width, lengths_R) + position_B
        token_B = np.repeat(bounds[:-1][rows], lengths_R) + position_B
        in_order = np.array_equal(rows, np.arange(len(bounds) - 1))
        return Bucket(len(rows), width, None if in_order else to_device(token_B, device), to_device(slot_B, device))


class Paths(NamedTuple):
    """Shared prefixes for the variable-length kernel: the queries are a row's new tokens, the keys its whole row.

    Rows 1 2 3 and 1 2 5 6: queries 1 2 3 | 5 6, keys 1 2 3 | 1 2 5 6.
    """

    slot_N: Tensor
    """Slots of the keys."""
    cu_keys: Tensor
    longest: int


class WholeRows(NamedTuple):
    """Shared prefixes for layers that cannot compute a row in parts: the shared tokens are repeated in every row.

    Rows 1 2 3 and 1 2 5 6 in the slots 1 2 3 5 6: slot_N 0 1 2 0 1 3 4, first_S 0 1 2 5 6.
    """

    packing: Packing
    slot_N: Tensor
    """The slot of each token of the rows."""
    first_S: Tensor
    """For each slot, the first token of the rows that has it."""

    @staticmethod
    def of(offsets_R: Int64s, slot_N: Int64s, device: torch.device, variable_length: bool = False) -> WholeRows:
        """The rows with these bounds, whose tokens are in these slots."""
        first_S = np.unique(slot_N, return_index=True)[1]
        packing = Packing.of(offsets_R, device, variable_length)
        return WholeRows(packing, to_device(slot_N, device), to_device(first_S, device))

    def repeat(self, x: Tensor) -> Tensor:
        """[S, ...] -> [N, ...], with gradients that are summed in the accumulation type."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide).index_select(0, self.slot_N).to(x.dtype)


class Part(NamedTuple):
    """A part of attention: queries in consecutive slots that attend to all keys in other slots, or causally to their
    own."""

    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True, slots=True)
class Packing:
    """The bounds of rows on the token axis, and further inputs of the attention kernels.

    The variable-length kernel takes the bounds. Other kernels take buckets of padded lines:

        cu_seqlens [0 3 5 9]  ->  lengths 3 2 4  ->  one bucket of 3 rows, 4 wide; slot_B 0 1 2 | 4 5 | 8 9 10 11

    With shared prefixes the bounds are those of each row's new tokens (`paths`), or of the runs of the prefix tree
    (`shared`).
    """

    cu_seqlens: Tensor
    max_length: int
    buckets: tuple[Bucket, ...] = ()
    """Empty for the variable-length kernel."""
    order_N: Tensor | None = None
    """Index of each packed token in the concatenation of all buckets; None if there is one bucket."""
    paths: Paths | None = None
    shared: tuple[Part, ...] = ()
    """Further parts of attention, in addition to the buckets."""
    whole: WholeRows | None = None
    """The rows of a tree, for linear attention and on CPU for attention in a window; None without shared prefixes."""
    offsets_R: Int64s | None = None
    """Bounds of the rows, without empty ones; None for a tree."""

    @property
    def chunks(self) -> Chunks:
        """The chunks of the rows, for linear attention."""
        if self.offsets_R is None:
            raise ValueError("the parts of a tree have no chunks, its whole rows have")
        return _chunks(tuple(self.offsets_R.tolist()), self.cu_seqlens.device)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row."""
        if self.whole is not None:
            return self.whole.packing.max_length
        return self.max_length if self.paths is None else self.paths.longest

    @staticmethod
    def of(offsets_R: Int64s, device: torch.device, variable_length: bool = False) -> Packing:
        """The packing of rows with these bounds, without empty rows."""
        lengths_R = np.diff(offsets_R)
        bounds = np.concatenate([offsets_R[:1], offsets_R[1:][lengths_R > 0]])
        cu_seqlens = to_device(bounds.astype(np.int32), device)
        max_length = int(lengths_R.max(initial=0))
        if variable_length:
            return Packing(cu_seqlens, max_length, offsets_R=bounds)
        buckets = _buckets(bounds, np.arange(len(bounds) - 1), device)
        token_N = [bucket.token_B for bucket in buckets if bucket.token_B is not None]
        order_N = torch.argsort(torch.cat(token_N)) if token_N else None
        return Packing(cu_seqlens, max_length, buckets, order_N, offsets_R=bounds)

    @staticmethod
    def of_tree(
        distinct: DistinctTokens, row_R: Int64s, offsets_R: Int64s, device: torch.device, variable_length: bool
    ) -> Packing:
        """The packing of rows that share prefixes, for the variable-length kernel or a CPU; `row_R`: the rows in
        depth-first order."""
        if variable_length:
            return _of_paths(distinct.slot_N, row_R, offsets_R, device)
        whole = WholeRows.of(offsets_R, distinct.slot_N, device)
        return replace(_of_runs(distinct.branches(), len(distinct.position_U), device), whole=whole)


def _of_paths(slot_N: Int64s, row_R: Int64s, offsets_R: Int64s, device: torch.device) -> Packing:
    queries, keys, paths = [0], [0], []
    for row in row_R.tolist():
        path = slot_N[offsets_R[row] : offsets_R[row + 1]]
        if len(path) and path[-1] >= queries[-1]:  # otherwise the row has no new tokens
            queries.append(int(path[-1]) + 1)
            keys.append(keys[-1] + len(path))
            paths.append(path)
    cu_keys = to_device(np.array(keys, np.int32), device)
    path_N = np.concatenate(paths)
    along = Paths(to_device(path_N, device), cu_keys, int(np.diff(keys).max()))
    whole = WholeRows.of(np.array(keys), path_N, device, variable_length=True)
    return replace(Packing.of(np.array(queries), device, variable_length=True), paths=along, whole=whole)


def _of_runs(branches: list[Branch], n_slots: int, device: torch.device) -> Packing:
    """A packing in which the tokens of every run attend to the run itself, and its descendants attend to it."""
    bounds = np.array([*(branch.start for branch in branches), n_slots])
    short = np.flatnonzero(np.diff(bounds) < LONG_RUN)
    own = [slice(run.start, run.stop) for run in branches if run.stop - run.start >= LONG_RUN]
    below = [
        Part(slice(run.stop, run.below), slice(run.start, run.stop), False) for run in branches if run.below > run.stop
    ]
    return Packing(
        cu_seqlens=to_device(bounds.astype(np.int32), device),
        max_length=int(np.diff(bounds).max()),
        buckets=_buckets(bounds, short, device),
        shared=(*(Part(run, run, True) for run in own), *below),
    )


@lru_cache(maxsize=4)
def _chunks(offsets_R: tuple[int, ...], device: torch.device) -> Chunks:
    """The chunks of rows, made once for all layers of a micro-batch."""
    return Chunks.of(np.array(offsets_R), device)


def _buckets(bounds: Int64s, rows: Int64s, device: torch.device) -> tuple[Bucket, ...]:
    groups = _rows_of_similar_length(np.diff(bounds)[rows])
    return tuple(Bucket.of(bounds, np.sort(rows[group]), device) for group in groups)


def _rows_of_similar_length(lengths_R: Int64s) -> list[list[int]]:
    """Rows sorted from long to short, in groups; a new group begins where padding would cost more than a kernel call.

    Lengths 3 2 900 4 -> [[2], [3, 0, 1]]
    """
    groups: list[list[int]] = []
    width = wasted = 0
    for row in np.argsort(-lengths_R, kind="stable").tolist():
        length = int(lengths_R[row])
        wasted += width * width - length * length
        if not groups or wasted > CALL_COST:
            groups.append([])
            width, wasted = length, 0
        groups[-1].append(row)
    return groups
