"""A micro-batch on the device: copied once, with everything that the forward pass and the loss index by."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.learn.losses.expand_to_tokens import NO_TRAJECTORY, broadcast, row_of_token
from service.learn.losses.reduction import row_shares
from service.learn.model.attention import Packing
from service.learn.model.device import to_device
from service.learn.model.padded import Padding
from service.types import ROUTE_NATIVELY, Int64s, MicroBatch


class DeviceBatch(NamedTuple):
    """A micro-batch on the device. Axis `M`: the tokens that carry loss, in packed order."""

    token_ids_N: Tensor
    position_ids_N: Tensor
    row_of_token_N: Tensor
    loss_mask_N: Tensor
    loss_token_M: Tensor
    """Index of the loss tokens on the packed axis."""
    rollout_M: Tensor
    """Log-probability of the token under the policy that sampled it."""
    staleness_M: Tensor
    temperature_R: Tensor
    trajectory_of_row_R: Tensor
    share_R: Tensor
    routed_experts_NLK: Tensor | None
    packing: Packing | None
    """None in the padded layout."""
    padding: Padding | None
    """None in the packed layout."""

    def of_trajectory(self, value_G: Tensor) -> Tensor:
        """[G] -> [M]: each loss token takes its trajectory's value."""
        value_N = broadcast(value_G, self.trajectory_of_row_R, self.row_of_token_N, self.loss_mask_N)
        return value_N.index_select(0, self.loss_token_M)

    def routed_experts(self) -> Tensor | None:
        """[tokens or slots, layers, topk] what the routers are to choose, in the order of the model's input."""
        if self.routed_experts_NLK is None or self.padding is None:
            return self.routed_experts_NLK
        slots = self.padding.token_ids_RW.numel()
        natively = self.routed_experts_NLK.new_full((slots, *self.routed_experts_NLK.shape[1:]), ROUTE_NATIVELY)
        return natively.index_copy(0, self.padding.slot_N, self.routed_experts_NLK)

    @property
    def trajectory_M(self) -> Tensor:
        """Each loss token's trajectory, as an index into the mini-batch's `_G` arrays."""
        return self.of_row(self.trajectory_of_row_R)

    def of_row(self, value_R: Tensor) -> Tensor:
        """[R] -> [M]: each loss token takes its row's value."""
        return value_R.index_select(0, self.row_of_token_N.index_select(0, self.loss_token_M))


class Placing(NamedTuple):
    """Where micro-batches go and how they are computed there."""

    device: torch.device
    dtype: torch.dtype
    """Type of log-probabilities and weights."""
    reduction: str = "token_mean"
    layout: str = "packed"
    variable_length: bool = False
    """Whether the variable-length attention kernel computes packed rows."""


def place(micro: MicroBatch, how: Placing) -> DeviceBatch:
    """Copy a micro-batch to the device."""
    device = how.device
    if len(micro.token_ids_N) == 0:
        micro = _dummy(micro)
    experts_NLK = micro.routed_experts_N
    loss_token_M = np.flatnonzero(micro.loss_mask_N)
    offsets_R = micro.offsets_R.astype(np.int64)
    _refuse_unpredictable(micro, offsets_R)

    def there(array: NDArray[Any], as_type: torch.dtype) -> Tensor:
        return to_device(array, device).to(as_type)

    return DeviceBatch(
        token_ids_N=there(micro.token_ids_N, torch.int64),
        position_ids_N=there(_positions(offsets_R), torch.int64),
        row_of_token_N=row_of_token(to_device(offsets_R, device), len(micro.token_ids_N)),
        loss_mask_N=to_device(micro.loss_mask_N, device),
        loss_token_M=to_device(loss_token_M, device),
        rollout_M=there(micro.logprobs_N[loss_token_M], how.dtype),
        staleness_M=there(micro.staleness_N[loss_token_M], torch.int64),
        temperature_R=there(micro.temperature_R, how.dtype),
        trajectory_of_row_R=there(micro.trajectory_of_row_R, torch.int64),
        share_R=there(row_shares(micro, how.reduction), how.dtype),
        routed_experts_NLK=None if experts_NLK is None else there(experts_NLK, torch.int64),
        packing=Packing.of(offsets_R, device, how.variable_length) if how.layout == "packed" else None,
        padding=Padding.of(micro, offsets_R, device) if how.layout == "padded" else None,
    )


def _positions(offsets_R: Int64s) -> Int64s:
    lengths_R = np.diff(offsets_R)
    return np.arange(offsets_R[-1]) - np.repeat(offsets_R[:-1], lengths_R)


def _refuse_unpredictable(micro: MicroBatch, offsets_R: Int64s) -> None:
    first_R = offsets_R[:-1][np.diff(offsets_R) > 0]
    if micro.loss_mask_N[first_R].any():
        raise ValueError("a row's first token carries loss, but nothing precedes it that could predict it")


def _dummy(micro: MicroBatch) -> MicroBatch:
    """One token without loss, for a rank that has nothing to compute while the others do."""
    return MicroBatch(
        token_ids_N=np.zeros(1, np.int32),
        offsets_R=np.array([0, 1], np.int64),
        loss_mask_N=np.zeros(1, bool),
        logprobs_N=np.zeros(1, np.float32),
        staleness_N=np.full(1, -1, np.int32),
        temperature_R=np.ones(1, np.float32),
        trajectory_of_row_R=np.full(1, NO_TRAJECTORY, np.int32),
        routed_experts_N=None,
    )
