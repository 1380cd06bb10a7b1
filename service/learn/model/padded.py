"""The padded layout: every row a line of its own, left-padded to the longest of the micro-batch, with a mask.

    rows  1 2 3 | 4 5          token_ids_RW   1 2 3      attended_RW   1 1 1      slot_N   0 1 2 | 4 5
                                              0 4 5                    0 1 1

What the model says about a packed token n stands at slot n of the flattened lines; all else is as in the packed layout.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from service.learn.model.device import to_device
from service.types import Int64s, MicroBatch


class Padding(NamedTuple):
    """A micro-batch's rows as padded lines."""

    token_ids_RW: Tensor
    position_ids_RW: Tensor
    attended_RW: Tensor
    slot_N: Tensor

    @staticmethod
    def of(micro: MicroBatch, offsets_R: Int64s, device: torch.device) -> Padding:
        """Left-pad the rows; those without tokens are left out."""
        lengths_R = np.diff(offsets_R)
        lengths_R = lengths_R[lengths_R > 0]
        width = int(lengths_R.max())
        row_N = np.repeat(np.arange(len(lengths_R)), lengths_R)
        start_R = np.cumsum(lengths_R) - lengths_R
        position_N = np.arange(len(row_N)) - start_R[row_N]
        slot_N = row_N * width + (width - lengths_R[row_N]) + position_N
        lines = np.zeros((3, len(lengths_R) * width), np.int64)
        lines[0, slot_N], lines[1, slot_N], lines[2, slot_N] = micro.token_ids_N, position_N, 1
        on_device = to_device(lines, device).view(3, len(lengths_R), width)
        return Padding(on_device[0], on_device[1], on_device[2], to_device(slot_N, device))
