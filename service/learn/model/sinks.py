"""Attention with sinks on GPUs, with a variable-length kernel that itself has no sinks.

The kernel returns the logarithm of each query's sum of weights. The sink's weight is added to it afterwards; if the
kernel's backward pass gets the output and the logarithm with the sink, it returns the gradient with the sink.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from service.learn.model import flash
from service.learn.model.shared_attention import Form, gradient_of_sinks, join_sinks

Bounds = tuple[Tensor, Tensor, int, int]
"""Bounds of queries and of keys, the longest row of each."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def with_sinks(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, window: int, form: Form) -> Any:
    """[T, heads, head_dim] queries, keys and values -> [T, heads, head_dim]; `window`: tokens before a token's own, -1:
    all."""
    return _WithSinks.apply(query, key, value, form.sinks, bounds, window, form.scaling)  # type: ignore[no-untyped-call]


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
        scale: float | None,
    ) -> Tensor:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        out: Tensor
        state = None
        if flash.takes(query):
            out, log_sum = flash.attend(query, key, value, *bounds, scale, window)
        else:
            kernel = torch.ops.torch_attn._varlen_attn
            out, log_sum, state = kernel(query, key, value, *bounds, window < 0, scale, [window, 0], enable_gqa=True)
        log_sum_T = log_sum.T.contiguous()
        join_sinks(out, log_sum_T, sinks)
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
        return *parts, gradient_of_sinks(of_out, out, log_sum_T, sinks), None, None, None
