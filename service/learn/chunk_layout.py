"""Cuts rows into chunks, and gives the order in which linear attention computes the chunks.

Every row begins a chunk of its own, so no state can pass from one row to another. Chunks are sorted by their index in
their row; chunks of equal index are sorted by the number of chunks of their row, largest first. A scan over the indices
computes all chunks of one index at once; `active_T` is the number of chunks of each index:

    rows of 5, 9 and 2 tokens, chunks of 4 tokens     chunks     row 1  row 0  row 2 | row 1  row 0 | row 1
                                                      active_T   3                     2              1

Axes: `N` tokens of the rows, `C` chunks, `T` indices of the scan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from service.types import Int64s

CHUNK = 64
"""Tokens per chunk. The cost inside a chunk is quadratic in its tokens; only a state is passed on to the next chunk."""


class Chunks(NamedTuple):
    """Where each token of several rows is in the chunks, and the order in which the chunks are computed."""

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
