"""Attention of tokens in a tree of shared prefixes, and attention with sinks, on CPU, computed in parts.

    rows 1 2 3 and 1 2 5 6      runs  1 2 | 3 | 5 6

    part 1    every run attends to itself, causally           a kernel call per run, or per bucket of short runs
    part 2    3 5 6 attend to 1 2, which they all follow      a kernel call per run that other runs follow

Each part returns the logarithm of its sum of weights; its output has the weight `exp(log_sum of the part - log_sum of
all parts)` in the total. If the kernel's backward pass gets the output and the logarithm of all parts together, it
returns the part's contribution to the total gradient.

A sink is one more part: a logit per head for a key whose value is 0.

Source: Dao et al. 2022 (FlashAttention), arXiv:2205.14135, sections 3.1 and B.2; joined parts: Liu et al. 2023 (Ring
Attention), arXiv:2310.01889.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from service.learn.attention_layout import Bucket, Packing
from service.learn.model.logprob import accumulation_dtype

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Form(NamedTuple):
    """Settings of attention that differ between families, and between layers of a family."""

    scaling: float | None = None
    """Factor of the logits; None: 1 / sqrt(head_dim)."""
    window: int | None = None
    """Number of tokens that a token attends to, itself included; None: all before it."""
    sinks: Tensor | None = None
    """[heads] logits that take part in the softmax and contribute nothing."""

    def mask(self, width: int, like: Tensor) -> Tensor | None:
        """[width, width] the mask that is added to a line's logits: -inf outside the window; None without a window."""
        if self.window is None:
            return None
        hidden = torch.ones(width, width, dtype=torch.bool, device=like.device)
        hidden = hidden.triu(1) | hidden.tril(-self.window)
        return like.new_zeros(width, width).masked_fill(hidden, -math.inf)


def join_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor) -> None:
    """Add the sinks to the output [T, heads, head_dim] and logarithm [T, heads] of an attention, in place."""
    whole = torch.logaddexp(log_sum, sinks.to(log_sum.dtype))
    out.mul_((log_sum - whole).exp()[..., None].to(out.dtype))
    log_sum.copy_(whole)


def gradient_of_sinks(of_out: Tensor, out: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    """[heads] the gradient of the logits of sinks, from outputs [T, heads, head_dim] and logarithms [T, heads]."""
    share = (sinks.to(log_sum.dtype) - log_sum).exp()
    return -(share * (of_out * out).sum(-1, dtype=log_sum.dtype)).sum(0).to(sinks.dtype)


class SharedAttention(torch.autograd.Function):
    """[S, heads, head_dim] queries, keys and values -> [S, heads, head_dim]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, packing: Packing, form: Form
    ) -> Tensor:
        """Compute all parts; saves the logarithm of each query's sum of weights."""
        scale = form.scaling
        out = torch.empty_like(query)
        log_sum = query.new_empty(query.shape[:2], dtype=accumulation_dtype(query.dtype))
        for bucket in packing.buckets:
            lines = [as_lines(x, bucket) for x in (query, key, value)]
            mask = form.mask(bucket.width, query)
            part, part_sum = _forward(*lines, is_causal=mask is None, attn_mask=mask, scale=scale)
            _write(out, bucket, part)
            _write(log_sum[..., None], bucket, part_sum[..., None])
        for queries, keys, causal in packing.shared:
            lines = [_line(x) for x in (query[queries], key[keys], value[keys])]
            part, part_sum = _forward(*lines, is_causal=causal, scale=scale)
            found = part[0].transpose(0, 1), part_sum[0].T
            if causal:
                out[queries], log_sum[queries] = found
            else:
                _join(out[queries], log_sum[queries], *found)
        if sinks is not None:
            join_sinks(out, log_sum, sinks)
        ctx.save_for_backward(query, key, value, sinks, out, log_sum)
        ctx.packing, ctx.form = packing, form._replace(sinks=None)
        return out

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the gradients of all parts."""
        query, key, value, sinks, out, log_sum = ctx.saved_tensors
        scale = ctx.form.scaling
        of_query, of_key, of_value = (torch.empty_like(x) for x in (query, key, value))
        for bucket in ctx.packing.buckets:
            of_lines, *lines, sums = (as_lines(x, bucket) for x in (of_out, query, key, value, out, log_sum[..., None]))
            mask = ctx.form.mask(bucket.width, query)
            sums = sums[..., 0].contiguous()
            parts = _backward(of_lines, *lines, sums, 0.0, mask is None, attn_mask=mask, scale=scale)
            for whole, part in zip((of_query, of_key, of_value), parts, strict=True):
                _write(whole, bucket, part)
        for queries, keys, causal in ctx.packing.shared:
            given = (of_out[queries], query[queries], key[keys], value[keys], out[queries])
            sums = log_sum[queries].T.contiguous()[None]
            parts = _backward(*(_line(x) for x in given), sums, 0.0, causal, scale=scale)
            for whole, part in zip((of_query[queries], of_key[keys], of_value[keys]), parts, strict=True):
                found = part[0].transpose(0, 1)
                whole.copy_(found) if causal else whole.add_(found)
        of_sinks = None if sinks is None else gradient_of_sinks(of_out, out, log_sum, sinks)
        return of_query, of_key, of_value, of_sinks, None, None


def _line(x: Tensor) -> Tensor:
    """[T, heads, head_dim] -> [1, heads, T, head_dim]"""
    return x.transpose(0, 1)[None]


def _join(out: Tensor, log_sum: Tensor, part: Tensor, part_sum: Tensor) -> None:
    """Add a part to the output [T, heads, head_dim] and logarithm [T, heads] of other parts, in place."""
    whole = torch.logaddexp(log_sum, part_sum)
    share = (part_sum - whole).exp()[..., None].to(out.dtype)
    out.lerp_(part, share)
    log_sum.copy_(whole)


def as_lines(x: Tensor, bucket: Bucket) -> Tensor:
    """[S, heads, head_dim] -> [rows, heads, width, head_dim], with zeros in the padding."""
    taken = x if bucket.token_B is None else x.index_select(0, bucket.token_B)
    slots = x.new_zeros(bucket.rows * bucket.width, *x.shape[1:]).index_copy(0, bucket.slot_B, taken)
    return slots.view(bucket.rows, bucket.width, *x.shape[1:]).transpose(1, 2)


def from_lines(x: Tensor, bucket: Bucket) -> Tensor:
    """[rows, heads, width, head_dim] -> [B, heads, head_dim]"""
    return x.transpose(1, 2).flatten(0, 1).index_select(0, bucket.slot_B)


def _write(whole: Tensor, bucket: Bucket, lines: Tensor) -> None:
    taken = from_lines(lines, bucket)
    if bucket.token_B is None:
        whole.copy_(taken)
    else:
        whole.index_copy_(0, bucket.token_B, taken)
