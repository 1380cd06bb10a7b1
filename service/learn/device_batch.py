"""A micro-batch on the device. It is copied once, with all indices that the forward pass and the loss need.

Two rows of trajectory 4, two tokens of which carry loss:

    packed tokens    5 6 7 | 5 6 7 8 9        trajectory_of_row_R   4 4
    loss_mask_N      0 0 1 | 0 0 0 0 1        row_of_token_N        0 0 0 1 1 1 1 1
    loss_token_M     2 7                      trajectory_M          4 4
    state_M          1 6                      token_ids_M           7 9

`state_M` depends on the layout. If the rows share their prefix, one state predicts the token 7 in both rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.columns import lengths_of, nested_offsets, offsets_of
from service.handoff.batches.pack import PrefixOrder, prefix_order
from service.learn.attention_layout import Packing, positions_in_rows, to_device
from service.learn.compile import compiled_on_gpu
from service.learn.sequence_parallel import WHOLE, Exchange, Slice
from service.types import NO_VERSION, ROUTE_NATIVELY, Int64s, MicroBatch, SupervisedRow

NO_TRAJECTORY = -1
"""Trajectory number of a dummy row, which belongs to no trajectory."""


class DeviceSettings(NamedTuple):
    """The device to which micro-batches are copied, and settings of the computation on it."""

    device: torch.device
    dtype: torch.dtype
    """Data type of log-probabilities and loss weights."""
    layout: str = "packed"
    variable_length: bool = False
    """Whether packed rows are computed by the variable-length attention kernel."""
    part: Slice = WHOLE
    """This rank's part of the tokens of each micro-batch."""


class Layout(NamedTuple):
    """Positions of one micro-batch's tokens in the model's input; all layouts are described in one form.

    Two rows, `1 2 3` and `1 2 5 6`, in the three layouts (`trainer.layout`):

        packed          1 2 3 1 2 5 6      slot_N 0 1 2 3 4 5 6      no token attends to another row
        padded          0 1 2 3            slot_N 1 2 3 4 5 6 7      left-padded lines of equal width
                        1 2 5 6
        shared_prefix   1 2 3 5 6          slot_N 0 1 2 0 1 3 4      a token attends to the tokens before it in its rows

    `slot_N` is the position ("slot", axis `S`) of each packed token in the model's input. A token that several rows
    share has one slot, whose hidden state predicts the next token of each of these rows.

    With sequence parallelism (`service.learn.sequence_parallel`) each rank of a group has a slice of the slots:

        rank 0 of 2     1 2 3 1            slots 0 1 2 3      `slot_N` counts over all slices; 0 pads the last slice
        rank 1 of 2     2 5 6 0            slots 4 5 6 7
    """

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


class Support(NamedTuple):
    """The tokens among which the sampler drew each loss token: `U` ids, one loss token after another, without the drawn
    token itself. A loss token that was drawn from the whole vocabulary has no ids.

        loss tokens 7 9 4; 7 was drawn from {5, 7, 8}, 9 from all, 4 from {4}      ids_U [5 8]   offsets_M [0 2 2 2]
                                                                                  truncated_M [True False True]
    """

    ids_U: Tensor
    offsets_M: Tensor
    """[M + 1] where each token's ids begin; on the host, because it says how much of `ids_U` to use."""
    truncated_M: Tensor

    @staticmethod
    def of(micro: MicroBatch, loss_token_M: Int64s, device: torch.device) -> Support | None:
        """The supports of these tokens; None if no token of the micro-batch has one."""
        if micro.support_size_N is None or micro.support_U is None:
            return None
        at_N, sizes_M = nested_offsets(micro.support_size_N), micro.support_size_N[loss_token_M]
        first_M, length_M = at_N[loss_token_M], lengths_of(at_N)[loss_token_M]
        offsets_M = offsets_of(length_M)
        index_U = np.arange(offsets_M[-1]) + np.repeat(first_M - offsets_M[:-1], length_M)
        ids_U = to_device(micro.support_U[index_U].astype(np.int32), device)
        return Support(ids_U, torch.from_numpy(offsets_M), to_device(sizes_M > 0, device))


class DeviceBatch(NamedTuple):
    """A micro-batch on the device, or a rank's slice of it.

    Axes: `M` the tokens that carry loss and whose hidden states are on this rank, in packed order; `S` slots of the
    model's input; `N` all tokens and `R` all rows of the micro-batch.
    """

    input_ids: Tensor
    """[lines, width] token ids of the model's input, `S` slots in all."""
    position_ids: Tensor
    attention: dict[str, Any]
    """The arguments with which the model computes its attention."""
    routed_experts_SLK: Tensor | None
    """The recorded experts of each layer, in the recorded type; each layer converts its own to a wider type."""
    state_M: Tensor
    """For each loss token, the slot whose hidden state predicts it."""
    token_ids_M: Tensor
    row_of_token_N: Tensor
    loss_mask_N: Tensor
    loss_token_M: Tensor
    """Index of each loss token on the packed axis."""
    rollout_logprob_M: Tensor
    """Log-probability of each loss token under the policy that sampled it."""
    staleness_M: Tensor
    temperature_R: Tensor
    trajectory_of_row_R: Tensor
    teacher_logprob_M: Tensor | None
    """Log-probability of each token under its teacher; NaN for a token without a teacher; None if no token has one."""
    support: Support | None
    """None: every token was drawn from the whole vocabulary."""
    turn_M: Tensor | None
    """For each loss token, its turn as an index into the mini-batch's `turn_advantage_X`; None if the mini-batch has
    no advantages by turn."""

    @staticmethod
    def of(micro: MicroBatch, settings: DeviceSettings) -> DeviceBatch:
        """Copy a micro-batch to the device. An empty micro-batch becomes a dummy row, because this rank has to take
        part in the collectives. The dummy row has two tokens, because a single token would need another graph.

        Raises:
            ValueError: the first token of a row carries loss.
        """
        if len(micro.token_ids_N) == 0:
            micro = unsampled_micro_batch([SupervisedRow(np.zeros(2, np.int32), np.zeros(2, bool))])
        device = settings.device
        offsets_R = micro.offsets_R.astype(np.int64)
        lengths_R = np.diff(offsets_R)
        if micro.loss_mask_N[offsets_R[:-1][lengths_R > 0]].any():
            raise ValueError("a row's first token carries loss, but no token precedes it that could predict it")
        layout = Layout.of(settings.layout, micro, device, settings.variable_length, settings.part)
        loss_token_M = np.flatnonzero(micro.loss_mask_N)
        own_M, state_M = layout.own(layout.slot_N[loss_token_M - 1])
        loss_token_M = loss_token_M[own_M]
        teacher_N, experts_NLK, experts_SLK = micro.teacher_logprobs_N, micro.routed_experts_N, None
        if experts_NLK is not None:
            unknown = np.int64(ROUTE_NATIVELY).astype(experts_NLK.dtype)
            experts_SLK = to_device(layout.in_slots(experts_NLK, int(unknown)), device)

        def copy(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
            return to_device(array, device).to(dtype)

        def laid_out(values_N: NDArray[Any]) -> Tensor:
            return copy(layout.in_slots(values_N), torch.int64)

        return DeviceBatch(
            input_ids=laid_out(micro.token_ids_N).view(layout.shape),
            position_ids=laid_out(positions_in_rows(lengths_R)).view(layout.shape),
            attention=layout.attention,
            routed_experts_SLK=experts_SLK,
            state_M=to_device(state_M, device),
            token_ids_M=copy(micro.token_ids_N[loss_token_M], torch.int64),
            row_of_token_N=row_of_token(to_device(offsets_R, device), len(micro.token_ids_N)),
            loss_mask_N=to_device(micro.loss_mask_N, device),
            loss_token_M=to_device(loss_token_M, device),
            rollout_logprob_M=copy(micro.logprobs_N[loss_token_M], settings.dtype),
            staleness_M=copy(micro.staleness_N[loss_token_M], torch.int64),
            temperature_R=copy(micro.temperature_R, settings.dtype),
            trajectory_of_row_R=copy(micro.trajectory_of_row_R, torch.int64),
            teacher_logprob_M=None if teacher_N is None else copy(teacher_N[loss_token_M], settings.dtype),
            support=Support.of(micro, loss_token_M, device),
            turn_M=None if micro.turn_N is None else copy(micro.turn_N[loss_token_M], torch.int64),
        )

    def trajectory_to_tokens(self, value_G: Tensor) -> Tensor:
        """[G] -> [M]: each loss token gets the value of its trajectory."""
        value_N = expand_to_tokens(value_G, self.trajectory_of_row_R, self.row_of_token_N, self.loss_mask_N)
        return value_N.index_select(0, self.loss_token_M)

    def row_to_tokens(self, value_R: Tensor) -> Tensor:
        """[R] -> [M]: each loss token gets the value of its row."""
        return value_R.index_select(0, self.row_of_token_N.index_select(0, self.loss_token_M))

    @property
    def trajectory_M(self) -> Tensor:
        """For each loss token, its trajectory as an index into the mini-batch's arrays with the axis `G`."""
        return self.row_to_tokens(self.trajectory_of_row_R)


def unsampled_micro_batch(rows: Sequence[SupervisedRow]) -> MicroBatch:
    """A micro-batch of supervised rows, such as demonstrations; its tokens have no trajectory and no sampled
    log-probability."""
    lengths = [len(row.token_ids) for row in rows]
    n_tokens = sum(lengths)
    return MicroBatch(
        token_ids_N=np.concatenate([np.zeros(0, np.int32), *(row.token_ids for row in rows)]).astype(np.int32),
        offsets_R=np.cumsum([0, *lengths], dtype=np.int64),
        loss_mask_N=np.concatenate([np.zeros(0, bool), *(row.loss_mask for row in rows)]).astype(bool),
        logprobs_N=np.zeros(n_tokens, np.float32),
        staleness_N=np.full(n_tokens, NO_VERSION, np.int32),
        temperature_R=np.ones(len(rows), np.float32),
        trajectory_of_row_R=np.full(len(rows), NO_TRAJECTORY, np.int32),
    )


def row_of_token(cu_seqlens: Tensor, n_tokens: int) -> Tensor:
    """[R + 1] bounds of the rows -> [N] the row of each token; an empty row has no tokens."""
    rows = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    return torch.repeat_interleave(rows, cu_seqlens.diff(), output_size=n_tokens)


@compiled_on_gpu
def expand_to_tokens(
    value_G: Tensor, trajectory_of_row_R: Tensor, row_of_token_N: Tensor, loss_mask_N: Tensor
) -> Tensor:
    """[G] -> [N]: a token with a set loss mask gets the value of its row's trajectory; all other tokens get 0, and so
    do tokens of a dummy row. Does not wait for the device.

        advantage_G           [ 0.5          -1.0 ]
        trajectory_of_row_R   [ 0      0       1  ]          two rows of trajectory 0, one of trajectory 1
        row_of_token_N        [ 0 0 0  1 1     2 2 2]
        loss_mask_N           [ 0 0 1  0 1     0 1 1]        each row's own mask
        result_N              [ 0 0 .5 0 .5    0 -1 -1]
    """
    value_R = value_G.index_select(0, trajectory_of_row_R.clamp(min=0))
    value_R = torch.where(trajectory_of_row_R >= 0, value_R, 0)
    return torch.where(loss_mask_N, value_R[row_of_token_N], 0)
