"""The inputs of attention kernels for a micro-batch whose rows lie on one token axis, with or without shared prefixes.

Axes: `N` tokens of the rows, `S` slots of the model's input (fewer than `N` where rows share a prefix), `B` tokens of
a bucket.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.handoff.batches.pack import PrefixOrder
from service.types import Int64s

CHUNK = 64
"""Tokens per chunk. The cost inside a chunk is quadratic in its tokens; only a state is passed on to the next chunk."""

CALL_COST = 256 * 256
"""Cost of one call of the attention kernel: computing this many entries of an attention matrix takes as long."""


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of an array on the device; the host does not wait for the transfer."""
    # a copy, because arrays from shared memory are read-only, which torch does not support
    host = torch.from_numpy(array.copy())
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def positions_in_rows(lengths_R: Int64s) -> Int64s:
    """[N] the position of each packed token in its row. Example: rows of lengths 3 and 2 give 0 1 2 0 1."""
    starts_R = np.cumsum(lengths_R) - lengths_R
    return np.arange(lengths_R.sum()) - np.repeat(starts_R, lengths_R)


class Lines(NamedTuple):
    """Tokens of several rows as padded lines: one line per row, padded on the right to the same width."""

    rows: int
    width: int
    token_B: Tensor | None
    """Index on the token axis of each token in the lines; None if the lines hold all tokens of the axis, in order."""
    slot_B: Tensor
    """Position of each token in the lines among their `rows * width` slots."""

    @staticmethod
    def of(bounds: Int64s, rows: Int64s, device: torch.device, slot_N: Int64s | None = None) -> Lines:
        """The padded lines of the rows whose indices are in `rows`. `bounds`: where each row of the batch begins and
        ends on the token axis. `slot_N`: the slot of each token; None if the slots are the tokens in order."""
        lengths_R = np.diff(bounds)[rows]
        width = int(lengths_R.max())
        position_B = positions_in_rows(lengths_R)
        slot_B = np.repeat(np.arange(len(rows)) * width, lengths_R) + position_B
        token_B = np.repeat(bounds[:-1][rows], lengths_R) + position_B
        in_order = slot_N is None and np.array_equal(rows, np.arange(len(bounds) - 1))
        token_B = token_B if slot_N is None else slot_N[token_B]
        return Lines(len(rows), width, None if in_order else to_device(token_B, device), to_device(slot_B, device))

    def fill(self, x: Tensor) -> Tensor:
        """Copy tokens into the lines and pad with 0: [tokens, heads, head_dim] -> [rows, heads, width, head_dim]."""
        slots = x if self.token_B is None else x.index_select(0, self.token_B)
        if len(slots) < self.rows * self.width:
            slots = x.new_zeros(self.rows * self.width, *x.shape[1:]).index_copy(0, self.slot_B, slots)
        return slots.view(self.rows, self.width, *x.shape[1:]).transpose(1, 2)

    def tokens(self, lines: Tensor) -> Tensor:
        """Take the tokens out of the padded lines: [rows, heads, width, head_dim] -> [B, heads, head_dim]."""
        return lines.transpose(1, 2).flatten(0, 1).index_select(0, self.slot_B)


@dataclass(frozen=True)
class Bucket:
    """Rows of similar length, padded together, which one call of the attention kernel computes."""

    queries: Lines
    keys: Lines
    before_R: Tensor | None
    """For each row, the number of its keys before its first query; None if this number is 0 for all rows."""
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)
    """Attention masks by window and data type, computed once for all layers."""

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """The mask that is added to the attention logits, [rows or 1, 1, queries, keys]: 0 where the query attends to
        the key (its own token and earlier tokens in the window), -inf elsewhere."""
        if (window, dtype) not in self._masks:
            queries, keys = (torch.arange(x.width, device=x.slot_B.device) for x in (self.queries, self.keys))
            before_R = keys[:1] if self.before_R is None else self.before_R
            # a padded query also sees a key, because not every kernel takes a query without keys
            last_B = (before_R[:, None, None] + queries[:, None]).clamp(max=self.keys.width - 1)
            distance = last_B - keys
            hidden = (distance < 0) | (distance >= (window or self.keys.width))
            self._masks[window, dtype] = torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -math.inf)[:, None]
        return self._masks[window, dtype]


class WholeRows(NamedTuple):
    """Complete rows, with the tokens of shared prefixes repeated in every row, for layers that need whole rows.

    Example: rows 1 2 3 and 1 2 5 6 share the tokens 1 2, so the slots hold 1 2 3 5 6. slot_N is 0 1 2 0 1 3 4, and
    first_S is 0 1 2 5 6.
    """

    packing: Packing
    slot_N: Tensor
    """The slot of each token of the rows."""
    first_S: Tensor
    """For each slot, the index of the first token that has this slot."""

    def repeat(self, x: Tensor) -> Tensor:
        """Repeat the values of shared tokens in each of their rows, [S, ...] -> [N, ...]. The backward pass adds up a
        slot's gradients in float32 or float64."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide).index_select(0, self.slot_N).to(x.dtype)


class Chunks(NamedTuple):
    """Where each token of several rows is in the chunks of linear attention, and the order in which the chunks are
    computed.

    Every row begins a chunk of its own, so no state can pass from one row to another. Chunks are sorted by their index
    in their row; chunks of equal index are sorted by the number of chunks of their row, largest first. A scan over the
    indices computes all chunks of one index at once; `active_T` is the number of chunks of each index:

        rows of 5, 9 and 2 tokens, chunks of 4 tokens     chunks     row 1  row 0  row 2 | row 1  row 0 | row 1
                                                          active_T   3                     2              1

    Axes: `N` tokens of the rows, `C` chunks, `T` indices of the scan.
    """

    slot_N: Tensor
    """Index of each token among the slots of all chunks; each chunk has `CHUNK` slots."""
    row_N: Tensor
    """Index of each token's row."""
    active_T: tuple[int, ...]
    """For each index of the scan, the number of rows that have a chunk of this index."""

    @staticmethod
    def of(offsets_R: Int64s, device: torch.device) -> Chunks:
        """The chunks of rows whose bounds on the token axis are `offsets_R`; no row may be empty."""
        lengths_R = np.diff(offsets_R)
        chunks_R = -(-lengths_R // CHUNK)
        place_R = np.empty(len(chunks_R), np.int64)
        place_R[np.argsort(-chunks_R, kind="stable")] = np.arange(len(chunks_R))
        active_T = np.bincount(chunks_R)[::-1].cumsum()[::-1][1:]
        first_T = np.cumsum(active_T) - active_T
        row_N = np.repeat(np.arange(len(lengths_R)), lengths_R)
        position_N = np.arange(len(row_N)) - (offsets_R[:-1] - offsets_R[0])[row_N]
        chunk_N = first_T[position_N // CHUNK] + place_R[row_N]
        slot_N = chunk_N * CHUNK + position_N % CHUNK
        on_device = [torch.from_numpy(x).to(device) for x in (slot_N, row_N)]
        return Chunks(on_device[0], on_device[1], tuple(active_T.tolist()))


@dataclass(frozen=True)
class Packing:
    """The bounds of rows on the token axis, and further inputs of the attention kernels.

    The variable-length kernel takes the bounds. Other kernels take buckets of rows padded to one
    length; `slot_B` is the index of each token in a bucket:

        cu_seqlens [0 3 5 9]  ->  lengths 3 2 4  ->  one bucket of 3 rows, 4 wide; slot_B 0 1 2 | 4 5 | 8 9 10 11

    Where rows share prefixes, the queries are a row's new tokens and the keys are its whole row. Rows `1 2 3`,
    `1 2 5 6`:

        queries 1 2 3 | 5 6      keys 1 2 3 | 1 2 5 6      cu_seqlens of the queries [0 3 5], of the keys [0 3 7]
    """

    cu_seqlens: Tensor
    """Bounds of the rows' queries on the token axis."""
    max_length: int
    offsets_R: Int64s
    """The values of `cu_seqlens`, as an array in CPU memory."""
    buckets: tuple[Bucket, ...] = ()
    """Buckets of padded rows; empty if the variable-length kernel is used."""
    order_N: Tensor | None = None
    """Index of each query in the concatenation of all buckets; None if there is only one bucket."""
    whole: WholeRows | None = None
    """The whole rows, whose tokens are the keys; None if no rows share prefixes."""

    @property
    def rows(self) -> Packing:
        """The packing of the whole rows: their tokens are the keys, also where the queries are only a row's new
        tokens."""
        return self if self.whole is None else self.whole.packing

    @cached_property
    def chunks(self) -> Chunks:
        """The chunks of whole rows, for linear attention."""
        return Chunks.of(self.offsets_R, self.cu_seqlens.device)

    @staticmethod
    def of(offsets_R: Int64s, device: torch.device, variable_length: bool = False) -> Packing:
        """The packing of rows whose bounds on the token axis are `offsets_R`; empty rows are left out.
        `variable_length`: for the variable-length kernel, which needs no buckets."""
        bounds = np.concatenate([offsets_R[:1], offsets_R[1:][np.diff(offsets_R) > 0]])
        packing = _of_bounds(bounds, device)
        return packing if variable_length else _bucketed(packing)

    @staticmethod
    def of_tree(
        order: PrefixOrder, slot_N: Int64s, offsets_R: Int64s, device: torch.device, variable_length: bool = False
    ) -> Packing:
        """The packing of rows that share prefixes. Tokens of a shared prefix are only keys and values; the queries are
        the tokens after the prefix. Rows without queries are left out. `slot_N`: each token's slot in the packing;
        `variable_length`: whether the variable-length kernel is used, which needs no buckets."""
        lengths_R = np.diff(offsets_R)[order.row_R]
        new_R = lengths_R - order.shared_R
        computed_R = new_R > 0
        queries, keys = (np.cumsum([0, *of_rows[computed_R]]) for of_rows in (new_R, lengths_R))
        path_N = np.concatenate([slot_N[offsets_R[row] : offsets_R[row + 1]] for row in order.row_R[computed_R]])
        first_S = np.unique(path_N, return_index=True)[1]
        whole = WholeRows(_of_bounds(keys, device), to_device(path_N, device), to_device(first_S, device))
        packing = replace(_of_bounds(queries, device), whole=whole)
        return packing if variable_length else _bucketed(packing, path_N)


def _of_bounds(bounds: Int64s, device: torch.device) -> Packing:
    return Packing(to_device(bounds.astype(np.int32), device), int(np.diff(bounds).max(initial=0)), bounds)


def _bucketed(packing: Packing, slot_N: Int64s | None = None) -> Packing:
    """The packing with buckets, for kernels that compute padded lines. `slot_N`: the slots of the keys, if rows share
    prefixes."""
    queries, keys, device = packing.offsets_R, packing.rows.offsets_R, packing.cu_seqlens.device
    before_R, buckets = np.diff(keys) - np.diff(queries), list[Bucket]()
    for group in _rows_of_similar_length(np.diff(queries), np.diff(keys)):
        rows = np.sort(group)
        of_queries = Lines.of(queries, rows, device)
        of_keys = of_queries if slot_N is None else Lines.of(keys, rows, device, slot_N)
        before = to_device(before_R[rows], device) if before_R[rows].any() else None
        buckets.append(Bucket(of_queries, of_keys, before))
    token_N = [bucket.queries.token_B for bucket in buckets if bucket.queries.token_B is not None]
    order_N = torch.argsort(torch.cat(token_N)) if token_N else None
    return replace(packing, buckets=tuple(buckets), order_N=order_N)


def _rows_of_similar_length(queries_R: Int64s, keys_R: Int64s) -> list[list[int]]:
    """Rows sorted from long to short, in groups; a new group begins where padding would cost more than a kernel call.

    Example: rows with 3, 2, 900 and 4 queries, and as many keys, give [[2], [3, 0, 1]].
    """
    groups: list[list[int]] = []
    width = longest = used = 0
    for row in np.argsort(-queries_R, kind="stable").tolist():
        queries, keys = int(queries_R[row]), int(keys_R[row])
        used, longest = used + queries * keys, max(longest, keys)
        if not groups or (len(groups[-1]) + 1) * width * longest - used > CALL_COST:
            groups.append([])
            width, longest, used = queries, keys, queries * keys
        groups[-1].append(row)
    return groups
