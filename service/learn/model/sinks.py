"""Attention with sinks on GPUs, computed by a variable-length kernel that does not support sinks.

The kernel computes attention without sinks, and returns the log-sum-exp of each query's attention logits. Then the
output and the log-sum-exp are corrected for the sinks. The kernel's backward pass gets these two corrected values and
returns the gradients for attention with sinks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from service.learn.model import flash

Bounds = tuple[Tensor, Tensor, int, int]
"""Bounds of the rows' queries and of their keys, then the largest number of queries and of keys in a row."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bounds: Bounds, window: int, scale: float
) -> Any:
    """Attention with sinks: queries, keys and values [tokens, heads, head_dim] -> [tokens, heads, head_dim]. `sinks`:
    [heads] logits of the sinks; `window`: number of earlier tokens to which a token attends, -1 for all."""
    return _WithSinks.apply(query, key, value, sinks, bounds, window, scale)  # type: ignore[no-untyped-call]


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        bounds: Bounds,
        window: int,
        scale: float,
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
