"""Places a micro-batch's tokens in the model's input; all layouts are described in one form.

Two rows, `1 2 3` and `1 2 5 6`, in the three layouts (`trainer.layout`):

    packed          1 2 3 1 2 5 6      slot_N 0 1 2 3 4 5 6      no token attends to another row
    padded          0 1 2 3            slot_N 1 2 3 4 5 6 7      left-padded lines of equal width
                    1 2 5 6
    shared_prefix   1 2 3 5 6          slot_N 0 1 2 0 1 3 4      a token attends to the tokens before it in its rows

`slot_N` is the position ("slot", axis `S`) of each packed token in the model's input. A token that several rows share
has one slot, whose hidden state predicts the next token of each of these rows.

With sequence parallelism (`service.learn.sequence_parallel`) each rank of a group has a slice of the slots:

    rank 0 of 2     1 2 3 1            slots 0 1 2 3      `slot_N` counts over all slices; 0 pads the last slice
    rank 1 of 2     2 5 6 0            slots 4 5 6 7
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from service.handoff.batches.pack import PrefixOrder, prefix_order
from service.learn.attention_layout import Packing, positions_in_rows, to_device
from service.learn.sequence_parallel import WHOLE, Exchange, Slice
from service.types import Int64s, MicroBatch


class Layout(NamedTuple):
    """Positions of one micro-batch's tokens in the model's input."""

    shape: tuple[int, int]
    """Number of lines of this rank's input, and number of slots per line."""
    slot_N: Int64s
    attention: dict[str, Any]
    """The arguments with which the model computes its attention."""
    first: int = 0
    """Index of the first slot on this rank."""

    @staticmethod
    def of(
        kind: str, micro: MicroBatch, device: torch.device, variable_length: bool = False, part: Slice = WHOLE
    ) -> Layout:
        """The token positions in the layout `kind`. `variable_length`: whether attention is computed by the
        variable-length kernel.

        `shared_prefix` and `auto` give the layout `packed` if no rows share a prefix, or on a GPU without the
        variable-length kernel. `part`: this rank's slice of the slots.
        """
        offsets_R = micro.offsets_R.astype(np.int64)
        if kind == "padded":
            if part.of > 1:
                raise ValueError("the lines of the layout padded cannot be cut into slices")
            return _padded(offsets_R, device)
        # other GPU kernels would compute each row separately
        if kind in ("shared_prefix", "auto") and (variable_length or device.type == "cpu"):
            order = prefix_order(micro.token_ids_N, offsets_R, micro.routed_experts_N)
            slot_N = distinct_slots(order, offsets_R)
            n_slots = int(slot_N.max(initial=-1)) + 1
            if n_slots < len(slot_N):
                packing = Packing.of_tree(order, slot_N, offsets_R, device, variable_length)
                return _on_one_line(slot_N, n_slots, packing, part)
        n_slots = len(micro.token_ids_N)
        return _on_one_line(np.arange(n_slots), n_slots, Packing.of(offsets_R, device, variable_length), part)

    def own(self, slot_X: Int64s) -> tuple[Int64s, Int64s]:
        """Find which of the slots `slot_X` of the whole micro-batch are on this rank. Returns their indices in
        `slot_X`, and their positions in this rank's input."""
        at_X = slot_X - self.first
        own_X = np.flatnonzero((at_X >= 0) & (at_X < math.prod(self.shape)))
        return own_X, at_X[own_X]

    def in_slots(self, values_N: NDArray[Any], fill: int = 0) -> NDArray[Any]:
        """[N, ...] -> [S, ...]: copy the values of packed tokens into the slots of this rank's input; padding gets
        `fill`."""
        values_S = np.full((math.prod(self.shape), *values_N.shape[1:]), fill, values_N.dtype)
        own_N, slot = self.own(self.slot_N)
        values_S[slot] = values_N[own_N]
        return values_S


def distinct_slots(order: PrefixOrder, offsets_R: Int64s) -> Int64s:
    """[N] the slot of each token if rows share the slots of common prefixes.

    tokens of the rows                  row 0: 1 2 3 4          row 1: 1 2 3      row 2: 1 2 7 8
    new tokens -> slots, in `order`     row 1: 1 2 3 -> 0 1 2   row 0: 4 -> 3     row 2: 7 8 -> 4 5
    slot_N                              row 0: 0 1 2 3          row 1: 0 1 2      row 2: 0 1 4 5
    """
    slot_N = np.zeros(int(offsets_R[-1]), np.int64)
    path, end = slot_N[:0], 0
    for row, shared in zip(order.row_R.tolist(), order.shared_R.tolist(), strict=True):
        slots = slot_N[offsets_R[row] : offsets_R[row + 1]]
        slots[:shared] = path[:shared]
        slots[shared:] = np.arange(end, end + len(slots) - shared)
        path, end = slots, end + len(slots) - shared
    return slot_N


def _on_one_line(slot_N: Int64s, n_slots: int, packing: Packing, part: Slice) -> Layout:
    """A layout with all slots on one line, cut into slices of equal width."""
    width = -(-n_slots // part.of)
    exchange = {} if part.group is None else {"exchange": Exchange(part.group, n_slots)}
    return Layout((1, width), slot_N, {"packing": packing, **exchange}, part.number * width)


def _padded(offsets_R: Int64s, device: torch.device) -> Layout:
    """A layout with a line for every nonempty row, left-padded to the longest row."""
    lengths_R = np.diff(offsets_R)
    lengths_R = lengths_R[lengths_R > 0]
    width = int(lengths_R.max())
    first_slot_R = np.arange(len(lengths_R)) * width + width - lengths_R
    slot_N = np.repeat(first_slot_R, lengths_R) + positions_in_rows(lengths_R)
    attended = np.zeros((len(lengths_R), width), np.int64)
    attended.reshape(-1)[slot_N] = 1
    return Layout((len(lengths_R), width), slot_N, {"attention_mask": to_device(attended, device)})
