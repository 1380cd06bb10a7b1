"""Expands one value per trajectory to the trajectory's tokens, on the device.

    advantage_G           [ 0.5          -1.0 ]
    trajectory_of_row_R   [ 0      0       1  ]          two rows of trajectory 0, one of trajectory 1
    cu_seqlens            [ 0      3       5       8]
    row_of_token_N        [ 0 0 0  1 1     2 2 2]
    loss_mask_N           [ 0 0 1  0 1     0 1 1]        each row's own mask
    result_N              [ 0 0 .5 0 .5    0 -1 -1]

No function of this module waits for the device, because the caller gives the number of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from service.learn.compile import compiled_on_gpu

NO_TRAJECTORY = -1
"""Trajectory number of a dummy row, which belongs to no trajectory."""


def row_of_token(cu_seqlens: Tensor, n_tokens: int) -> Tensor:
    """[R + 1] bounds of the rows -> [N] the row of each token; an empty row has no tokens."""
    rows = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    return torch.repeat_interleave(rows, cu_seqlens.diff(), output_size=n_tokens)


@compiled_on_gpu
def expand_to_tokens(
    value_G: Tensor, trajectory_of_row_R: Tensor, row_of_token_N: Tensor, loss_mask_N: Tensor
) -> Tensor:
    """[G] -> [N]: a token with a set loss mask gets the value of its row's trajectory; all other tokens get 0.

    Tokens of a dummy row (trajectory -1) also get 0.
    """
    value_R = value_G.index_select(0, trajectory_of_row_R.clamp(min=0))
    value_R = torch.where(trajectory_of_row_R >= 0, value_R, 0)
    return torch.where(loss_mask_N, value_R[row_of_token_N], 0)
