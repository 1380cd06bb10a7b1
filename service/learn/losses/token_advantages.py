"""Advantages of tokens, computed on the device: from one value per trajectory or turn, or by REINFORCE++.

With credit by turn, a mini-batch has one advantage per turn of each trajectory, and each loss token has the index of
its turn.

REINFORCE++ (one row per trajectory, `step_wise: false`): the value of the last sampled token is the return R, the value
of each earlier token is gamma times the value of the next sampled token. Then the values are whitened over all loss
tokens of the mini-batch. Source: Hu et al. 2025, arXiv:2501.03262.

    loss tokens of a trajectory with R = 1, gamma = 0.5     [0.25  0.5  1]
    (value - mean) / standard deviation                     mean and deviation over all ranks' trajectories

Mean and variance follow from the trajectories' returns and token counts alone (geometric sums), so every rank computes
them without communication.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from service.learn.device_batch import DeviceBatch
from service.types import Float64s, MiniBatch

WHITEN_EPSILON = 1e-8


class Whitening(NamedTuple):
    """Maps discounted returns to advantages: `(return * gamma ** tokens after - mean) * scale`.

    `tokens after`: the number of later loss tokens in the token's row.
    """

    gamma: float
    mean: float
    scale: float


def whitening(batch: MiniBatch, gamma: float) -> Whitening:
    """The whitening for a mini-batch, from mean and standard deviation of the discounted returns of its loss tokens."""
    if (batch.rows_G > 1).any():
        raise ValueError("reinforce++ needs every trajectory in one row: it discounts along one token axis")
    tokens_G = batch.loss_tokens_G.astype(np.float64)
    total = tokens_G.sum()
    mean = float(batch.return_G @ _geometric_sum(gamma, tokens_G) / max(total, 1))
    square = float(np.square(batch.return_G) @ _geometric_sum(gamma * gamma, tokens_G))
    variance = max(0.0, square - total * mean * mean) / max(total - 1, 1)
    return Whitening(gamma, mean, 1.0 / float(np.sqrt(variance + WHITEN_EPSILON)))


def _geometric_sum(ratio: float, terms_G: Float64s) -> Float64s:
    """1 + ratio + ... + ratio ** (terms - 1)"""
    return terms_G if ratio == 1 else (1 - ratio**terms_G) / (1 - ratio)


def turn_advantages(value_X: Tensor, micro: DeviceBatch) -> Tensor:
    """[M] for each loss token, the advantage of its turn. `value_X`: the advantage of each turn.

    Raises:
        ValueError: the micro-batch has no turn numbers for its loss tokens.
    """
    if micro.turn_M is not None:
        return value_X.index_select(0, micro.turn_M)
    if len(micro.loss_token_M):
        raise ValueError("the mini-batch has an advantage per turn, but a micro-batch has loss tokens of no turn")
    return value_X.new_zeros(0)


def token_advantages(value_G: Tensor, whitening: Whitening | None, micro: DeviceBatch) -> Tensor:
    """[M] the advantage of each loss token. `value_G`: the advantage of each trajectory; if `whitening` is given, the
    return of each trajectory."""
    value_M = micro.trajectory_to_tokens(value_G)
    if whitening is None:
        return value_M
    discounted_M = value_M * whitening.gamma ** _tokens_after(micro).to(value_M.dtype)
    return (discounted_M - whitening.mean) * whitening.scale


def _tokens_after(micro: DeviceBatch) -> Tensor:
    """[M] how many loss tokens follow in the token's row, including those on other ranks."""
    row_M = micro.row_of_token_N.index_select(0, micro.loss_token_M)
    last_M = torch.searchsorted(micro.row_of_token_N, row_M, right=True) - 1
    until_N = micro.loss_mask_N.cumsum(0)
    return until_N.index_select(0, last_M) - until_N.index_select(0, micro.loss_token_M)
