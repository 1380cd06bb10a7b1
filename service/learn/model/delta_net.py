"""Linear attention (gated delta net) of Qwen3.5 and similar families for packed rows, with the modules of the family's
code.

Projections, norm and gate need only a token's own values. Between projections and norm, the convolution and the gated
delta rule need whole rows: where rows share prefixes, each row is computed in full; with sequence parallelism, each
rank computes all tokens for some of the heads.

Each head has a state S [key_dim, value_dim] for each row. S begins at 0, and each token of the row updates it:

    S <- exp(g) S;    S <- S + beta k (v - S^T k)^T;    output S^T q

All tokens of a chunk are computed together. A triangular system is solved for u and w; the values that the chunk adds
are `u - w S`, where S is the state before the chunk. The cost is linear in the number of tokens. Transformers' own
functions ignore where rows begin, and compute in float32.

Source: Yang et al. 2024 (Gated Delta Networks), arXiv:2412.06464, section 3.3; WY form: arXiv:2406.06484.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from service.learn.attention_layout import CHUNK, Chunks, Packing
from service.learn.model.logprob import accumulation_dtype
from service.learn.sequence_parallel import Exchange

EPSILON = 1e-6
"""Value added to the squared norms of queries and keys, so that no norm is 0."""

MIXER = "linear_attn"
"""Name of a decoder layer's attribute that holds its linear attention."""


def use_packed_rows(layers: nn.ModuleList) -> None:
    """Make the linear attention of these decoder layers compute packed rows: several rows on one token axis, each with
    a state of its own."""
    for layer in layers:
        if (mixer := getattr(layer, MIXER, None)) is not None:
            mixer.forward = partial(packed_delta_net, mixer)


def packed_delta_net(
    mixer: Any, hidden_states: Tensor, packing: Packing, exchange: Exchange | None = None, **_: Any
) -> Tensor:
    """Linear attention over one packed batch: [1, S, hidden_size] -> [1, S, hidden_size]. `exchange`: the all-to-alls
    of sequence parallelism; given if `hidden_states` has only one rank's slice of the slots."""
    *mixed, z = _projected(mixer, hidden_states[0])
    out = _over_rows(mixer, mixed, packing, exchange)
    normed = mixer.norm(out.reshape(-1, mixer.head_v_dim).to(z.dtype), z.reshape(-1, mixer.head_v_dim))
    projected: Tensor = mixer.out_proj(normed.view(1, len(z), -1))
    return projected


def _projected(mixer: Any, hidden: Tensor) -> list[Tensor]:
    """Queries, keys, values, beta and decay (before activations), and the gate: [S, heads x dimension] each."""
    if hasattr(mixer, "in_proj_qkvz"):
        query, key, value, z, b, a = mixer.fix_query_key_value_ordering(
            mixer.in_proj_qkvz(hidden)[None], mixer.in_proj_ba(hidden)[None]
        )
        return [x[0].flatten(1) for x in (query, key, value, b, a, z)]
    parts = mixer.in_proj_qkv(hidden).split(_widths(mixer), -1)
    return [*parts, *(project(hidden) for project in (mixer.in_proj_b, mixer.in_proj_a, mixer.in_proj_z))]


def _widths(mixer: Any) -> list[int]:
    return [mixer.key_dim, mixer.key_dim, mixer.value_dim]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _over_rows(mixer: Any, mixed: list[Tensor], packing: Packing, exchange: Exchange | None) -> Tensor:
    """[S, heads, value_dim] the output of the delta rule for each slot."""
    taps = mixer.conv1d.weight.squeeze(1).split(_widths(mixer))
    of_heads = [*taps, mixer.A_log, mixer.dt_bias]
    if exchange is not None:
        mixed, of_heads = exchange.to_channels(mixed), [exchange.own(weight) for weight in of_heads]
    *taps, a_log, dt_bias = of_heads
    if packing.whole is not None:
        mixed = [packing.whole.repeat(x) for x in mixed]
    chunks = packing.rows.chunks
    wide = accumulation_dtype(mixed[0].dtype)
    query, key, value, b, a = (x.to(wide) for x in mixed)
    convolved = F.silu(causal_convolution(torch.cat((query, key, value), 1), torch.cat(taps).to(wide), chunks))
    query, key, value = torch.split(convolved, [len(weight) for weight in taps], 1)
    heads = len(a_log)
    query, key = (
        x.view(len(x), -1, mixer.head_k_dim).repeat_interleave(mixer.num_v_heads // mixer.num_k_heads, 1)
        for x in (query, key)
    )
    g = -a_log.to(wide).exp() * F.softplus(a + dt_bias.to(wide))
    out = gated_delta_rule(query, key, value.view(len(value), heads, -1), g, b.sigmoid(), chunks)
    if packing.whole is not None:
        out = out.index_select(0, packing.whole.first_S)
    return out if exchange is None else exchange.to_slots(out)


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
    [N, heads, value_dim], log decay `g` and beta [N, heads]; all in float32 (float64 for a float64 model)."""
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
    # `split`, because the gradient of each slice would be as large as that of the whole tensor
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
