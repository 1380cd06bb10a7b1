"""The gated delta rule and the causal convolution of linear attention, for rows on one token axis.

Each head has a state S [key_dim, value_dim] for each row. S begins at 0, and each token of the row updates it:

    S <- exp(g) S;    S <- S + beta k (v - S^T k)^T;    output S^T q

All tokens of a chunk are computed together. A triangular system is solved for u and w; the values that the chunk adds
are `u - w S`, where S is the state before the chunk. The cost is linear in the number of tokens. Transformers' own
functions ignore where rows begin, and compute in float32.

Source: Yang et al. 2024 (Gated Delta Networks), arXiv:2412.06464, section 3.3; WY form: arXiv:2406.06484.
"""

from __future__ import annotations

import math
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from service.learn.chunk_layout import CHUNK, Chunks

EPSILON = 1e-6
"""Value added to the squared norms of queries and keys, so that no norm is 0."""


def causal_convolution(x: Tensor, weight: Tensor, chunks: Chunks) -> Tensor:
    """[N, channels], [channels, taps] -> [N, channels]: convolve each row separately, as if zeros came before it."""
    before = weight.shape[1] - 1
    n_rows = chunks.active_T[0]
    slot_N = torch.arange(len(x), device=x.device) + before * (chunks.row_N + 1)
    spaced = x.new_zeros(len(x) + before * n_rows, x.shape[1]).index_copy(0, slot_N, x)
    out = F.conv1d(spaced.T[None], weight[:, None], groups=len(weight))
    return out[0].T.index_select(0, slot_N - before)


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """The output of each token, [N, heads, value_dim], from queries and keys [N, heads, key_dim], values
    [N, heads, value_dim], log decay `g` and beta [N, heads]; all in float32 (float64 for a float64 model). On a GPU,
    the kernels of flash-linear-attention are used if they are installed."""
    if query.is_cuda and (kernel := _fla()) is not None:
        return _by_kernel(kernel, query, key, value, g, beta, chunks)
    query, key = (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    n_chunks = sum(chunks.active_T)

    def placed(x: Tensor) -> Tensor:
        """[N, heads, ...] -> [C, heads, CHUNK, ...]"""
        slots = x.new_zeros(n_chunks * CHUNK, *x.shape[1:]).index_copy(0, chunks.slot_N, x)
        return slots.view(n_chunks, CHUNK, *x.shape[1:]).transpose(1, 2)

    query, key, value, g, beta = (placed(x) for x in (query, key, value, g, beta[..., None]))
    decay = g.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -math.inf).exp()
    within = (query @ key.mT) * between
    system = (key * beta) @ key.mT * between
    sides = torch.cat((value, key * decay.exp()[..., None]), -1) * beta
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    u, w = solved.split((value.shape[-1], key.shape[-1]), -1)
    from_state = query * decay.exp()[..., None]
    to_state = key * (decay[..., -1:] - decay).exp()[..., None]
    kept = decay[..., -1, None, None].exp()
    # `split`, because with slices each step would have a gradient as large as the whole
    steps = zip(
        *(torch.split(x, list(chunks.active_T)) for x in (u, w, from_state, within, kept, to_state)), strict=True
    )
    state, outputs = None, []
    for added, reads, queries, inside, fraction, writes in steps:
        if state is None:
            outputs.append(inside @ added)
            state = writes.mT @ added
            continue
        if len(state) > len(added):
            state = state[: len(added)]
        added = added - reads @ state
        outputs.append(queries @ state + inside @ added)
        state = fraction * state + writes.mT @ added
    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    return out.index_select(0, chunks.slot_N)


@cache
def _fla() -> Any:
    """The kernel of flash-linear-attention; None if it is not installed."""
    if find_spec("fla") is None:
        return None
    return import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule


def _by_kernel(
    kernel: Any, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunks: Chunks
) -> Tensor:
    ends = torch.bincount(chunks.row_N, minlength=chunks.active_T[0]).cumsum(0)
    lines = [x[None].to(torch.bfloat16) for x in (query, key, value)]
    out, _ = kernel(
        *lines, g=g[None], beta=beta[None], cu_seqlens=F.pad(ends, (1, 0)).to(torch.int32),
        use_qk_l2norm_in_kernel=True, output_final_state=False,
    )  # fmt: skip
    return cast(Tensor, out[0].to(value.dtype))
