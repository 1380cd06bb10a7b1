"""Causal attention within each row of a packed micro-batch, registered with Hugging Face models as `baton_packed`.

No token attends to another row. On CUDA in bfloat16, one variable-length kernel computes all rows. Elsewhere, torch's
padded kernel computes buckets of rows of similar length (`service.learn.attention_layout`). Where rows share prefixes,
the keys of each whole row are gathered, and the row's new tokens attend to them.
"""

from __future__ import annotations

import logging
from functools import cache
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from service.errors import UserError
from service.learn.attention_layout import Bucket, Packing
from service.learn.model import flash
from service.learn.sequence_parallel import Exchange

log = logging.getLogger(__name__)

NAME = "baton_packed"

_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Arguments that allow fewer key heads than query heads; older torch always allows this and has no such argument."""


@cache
def use_fastest_attention(device: torch.device) -> str:
    """Choose the fastest attention kernel for this GPU, and return and log its name: FA4 where FlashAttention 4 is
    installed and works, else FA2, which is part of torch."""
    if device.type != "cuda":
        return "FA2"
    chosen = "FA4" if flash.begin(device) else "FA2"
    log.info("attention: FlashAttention %s", chosen[2:])
    return chosen


WINDOW = "sliding_window"
"""Name of the argument that gives the number of tokens to which a token attends, including itself; 0 or None: all
earlier tokens."""

Bounds = tuple[Tensor, Tensor, int, int]
"""Bounds of the rows' queries and of their keys, then the largest number of queries and of keys in a row."""

IGNORED = frozenset({WINDOW, "dropout", "position_ids", "use_cache", "output_attentions", "output_router_logits"})
"""Arguments of a family's attention that have no effect here, because engines sample without dropout and training has
no cache."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    packing: Packing,
    scaling: float | None = None,
    exchange: Exchange | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention over one packed batch: [1, heads, S, head_dim] -> [1, S, heads, head_dim].

    `exchange`: the all-to-alls of sequence parallelism; given if `query`, `key` and `value` have only one rank's slice
    of the slots. `packing` describes the whole batch. `s_aux` [heads]: logits of attention sinks. The window is the
    argument `sliding_window`, or else the module's attribute of this name.

    Raises:
        UserError: the family's attention passes an argument that is not supported.
    """
    if unknown := sorted(name for name, value in others.items() if value is not None and name not in IGNORED):
        raise UserError(f"its attention needs {', '.join(unknown)}, which packed rows do not support")
    if not getattr(module, "is_causal", True):
        raise UserError("its attention is not causal, which packed rows do not support")
    window = others.get(WINDOW, getattr(module, WINDOW, None)) or None
    if window is not None and window >= packing.rows.max_length:
        window = None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if exchange is not None:
        query, key, value = exchange.to_heads(query, key, value)
        s_aux = None if s_aux is None else exchange.own(s_aux)
    if packing.buckets:
        parts = [_padded(query, key, value, bucket, scale, window, s_aux) for bucket in packing.buckets]
        out = parts[0] if packing.order_N is None else torch.cat(parts).index_select(0, packing.order_N)
    else:
        out = _variable_length(query, key, value, packing, scale, window, s_aux)
    return (out if exchange is None else exchange.to_slots(out)).unsqueeze(0), None


def _variable_length(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    if packing.whole is not None:
        key, value = packing.whole.repeat(key), packing.whole.repeat(value)
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    rows = packing.rows
    bounds = (packing.cu_seqlens, rows.cu_seqlens, packing.max_length, rows.max_length)
    before = -1 if window is None else window - 1
    if sinks is not None:
        return cast(Tensor, with_sinks(query, key, value, sinks, bounds, before, scale))
    if flash.takes(query):
        return cast(Tensor, flash.attend(query, key, value, *bounds, scale, before)[0])
    return cast(Tensor, varlen_attn(query, key, value, *bounds, scale=scale, window_size=(before, 0), **_GROUPED))


def _padded(
    query: Tensor, key: Tensor, value: Tensor, bucket: Bucket, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    query, key, value = bucket.queries.fill(query), bucket.keys.fill(key), bucket.keys.fill(value)
    mask = None
    if window is not None or sinks is not None or bucket.before_R is not None:
        mask = bucket.mask(window, query.dtype)
    if mask is not None and sinks is not None:
        # appends a key whose logit is the sink and whose value is 0
        rows, heads, width, _ = query.shape
        of_sinks = sinks.to(query.dtype)[:, None, None].expand(rows, heads, width, 1)
        mask = torch.cat((mask.expand(rows, heads, -1, -1), of_sinks), -1)
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return bucket.queries.tokens(out)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bounds: Bounds, window: int, scale: float
) -> Any:
    """Attention with sinks: queries, keys and values [tokens, heads, head_dim] -> [tokens, heads, head_dim]. `sinks`:
    [heads] logits of the sinks; `window`: number of earlier tokens to which a token attends, -1 for all.

    The kernel does not support sinks: it computes attention without them, and returns the log-sum-exp of each query's
    attention logits. Output and log-sum-exp are corrected for the sinks. The kernel's backward pass gets these two
    corrected values and returns the gradients for attention with sinks.
    """
    return _WithSinks.apply(query, key, value, sinks, bounds, window, scale)  # type: ignore[no-untyped-call]


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bounds: Bounds, window: int, scale: float
    ) -> Tensor:
        out: Tensor
        state = None
        if flash.takes(query):
            out, log_sum = flash.attend(query, key, value, *bounds, scale, window)
        else:
            kernel = torch.ops.torch_attn._varlen_attn
            out, log_sum, state = kernel(query, key, value, *bounds, window < 0, scale, [window, 0], enable_gqa=True)
        of_kernel = log_sum.T
        log_sum_T = torch.logaddexp(of_kernel, sinks.to(log_sum.dtype))
        out.mul_((of_kernel - log_sum_T).exp()[..., None].to(out.dtype))
        ctx.save_for_backward(query, key, value, sinks, out, log_sum_T, state, *bounds[:2])
        ctx.lengths, ctx.window, ctx.scale = bounds[2:], window, scale
        return out

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, log_sum_T, state, *bounds = ctx.saved_tensors
        given = (of_out, query, key, value, out, log_sum_T.T.contiguous(), *bounds, *ctx.lengths)
        if flash.takes(query):
            parts = flash.attend_backward(*given, ctx.scale, ctx.window)
        else:
            backward = torch.ops.torch_attn._varlen_attn_backward
            parts = backward(*given, ctx.window < 0, state, ctx.scale, [ctx.window, 0])
        share = (sinks.to(log_sum_T.dtype) - log_sum_T).exp()
        of_sinks = -(share * (of_out * out).sum(-1, dtype=log_sum_T.dtype)).sum(0).to(sinks.dtype)
        return *parts, of_sinks, None, None, None


# without a mask function of this name Hugging Face makes no mask, and does not detect packed rows itself
AttentionInterface.register(NAME, packed_attention)
