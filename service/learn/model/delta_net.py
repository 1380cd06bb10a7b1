"""Linear attention (gated delta net) of Qwen3.5 and similar families for packed rows, with the modules of the family's
code.

Projections, norm and gate need only a token's own values. Between projections and norm, the convolution and the gated
delta rule need whole rows (`service.learn.model.delta_rule`): where rows share prefixes, each row is computed in full;
with sequence parallelism, each rank computes all tokens for some of the heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from service.learn.attention_layout import Packing
from service.learn.model.delta_rule import causal_convolution, gated_delta_rule
from service.learn.model.logprob import accumulation_dtype
from service.learn.sequence_parallel import Exchange

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
