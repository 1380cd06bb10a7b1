"""How the rows of a micro-batch reach the model: packed on one token axis, or padded to lines of equal width.

Two rows, `1 2 3` and `4 5`:

    packed   token_ids_N  1 2 3 4 5      cu_seqlens  0 3 5      no token attends to another row
    padded   token_ids_RW 1 2 3          attended_RW 1 1 1      slot_N  0 1 2 4 5
                          0 4 5                      0 1 1

`slot_N` is the place of each packed token among the `rows * width` slots of padded lines. Axis `B`: a bucket's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.types import Int64s, MicroBatch

CALL_COST = 256 * 256
"""Entries of an attention matrix that cost about as much as one more call of the attention kernel."""


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
    """Rows of similar length, which one call of the attention kernel computes as padded lines."""

    rows: int
    width: int
    token_B: Tensor | None
    """Index of the bucket's tokens on the packed axis; None if they are all tokens, in order."""
    slot_B: Tensor
    """Slot of the same tokens among `rows * width`."""

    @staticmethod
    def of(bounds: Int64s, rows: Int64s, device: torch.device) -> Bucket:
        """A bucket of some of the rows with these bounds; no `token_B` if `rows` names all of them, in order."""
        lengths_R = np.diff(bounds)[rows]
        width = int(lengths_R.max())
        position_B = positions_in_rows(lengths_R)
        slot_B = np.repeat(np.arange(len(rows)) * width, lengths_R) + position_B
        token_B = np.repeat(bounds[:-1][rows], lengths_R) + position_B
        in_order = np.array_equal(rows, np.arange(len(bounds) - 1))
        return Bucket(len(rows), width, None if in_order else to_device(token_B, device), to_device(slot_B, device))


@dataclass(frozen=True, slots=True)
class Packing:
    """The packed layout: where each row lies on the token axis, and how attention computes the rows.

    The variable-length kernel takes the bounds. Other kernels take buckets of padded lines:

        cu_seqlens [0 3 5 9]  ->  lengths 3 2 4  ->  one bucket of 3 rows, 4 wide; slot_B 0 1 2 | 4 5 | 8 9 10 11
    """

    cu_seqlens: Tensor
    max_length: int
    buckets: tuple[Bucket, ...]
    """Empty for the variable-length kernel."""
    order_N: Tensor | None
    """Index of each packed token in the concatenation of all buckets; None if there is one bucket."""

    @staticmethod
    def of(offsets_R: Int64s, device: torch.device, variable_length: bool = False) -> Packing:
        """The layout of rows with these bounds, without empty rows."""
        lengths_R = np.diff(offsets_R)
        bounds = np.concatenate([offsets_R[:1], offsets_R[1:][lengths_R > 0]])
        cu_seqlens = to_device(bounds.astype(np.int32), device)
        max_length = int(lengths_R.max(initial=0))
        if variable_length:
            return Packing(cu_seqlens, max_length, (), None)
        groups = _rows_of_similar_length(np.diff(bounds))
        buckets = tuple(Bucket.of(bounds, np.sort(rows), device) for rows in groups)
        token_N = [bucket.token_B for bucket in buckets if bucket.token_B is not None]
        return Packing(cu_seqlens, max_length, buckets, torch.argsort(torch.cat(token_N)) if token_N else None)


def _rows_of_similar_length(lengths_R: Int64s) -> list[list[int]]:
    """Rows by falling length; a new group begins where padding would cost more than another kernel call.

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


class Padding(NamedTuple):
    """The padded layout: every row is a line, left-padded to the longest row of the micro-batch. Axis `W`: slots."""

    token_ids_RW: Tensor
    position_ids_RW: Tensor
    attended_RW: Tensor
    """1 where a token is, 0 in the padding."""
    slot_N: Tensor
    """Slot of each packed token in the flattened lines, where the model's output for it stands."""

    @staticmethod
    def of(micro: MicroBatch, offsets_R: Int64s, device: torch.device) -> Padding:
        """Left-pad the rows, without empty rows."""
        lengths_R = np.diff(offsets_R)
        lengths_R = lengths_R[lengths_R > 0]
        width = int(lengths_R.max())
        position_N = positions_in_rows(lengths_R)
        first_slot_R = np.arange(len(lengths_R)) * width + width - lengths_R
        slot_N = np.repeat(first_slot_R, lengths_R) + position_N
        lines = np.zeros((3, len(lengths_R) * width), np.int64)
        lines[0, slot_N], lines[1, slot_N], lines[2, slot_N] = micro.token_ids_N, position_N, 1
        on_device = to_device(lines, device).view(3, len(lengths_R), width)
        return Padding(on_device[0], on_device[1], on_device[2], to_device(slot_N, device))
