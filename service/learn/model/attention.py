"""Causal attention inside the rows of a packed micro-batch, registered with Hugging Face models as `baton_packed`.

Rows lie one after another on the token axis; no token sees another row. On CUDA in bfloat16 one variable-length kernel
does it. Elsewhere rows of similar length are padded together, as a kernel call costs more than a few padded slots:

    cu_seqlens [0 3 5 9]  ->  lengths 3 2 4  ->  one bucket of 3 rows, 4 wide
    slots (row * 4 + position): 4 5 6 | 8 9 | 0 1 2 3      (rows by falling length: 4, 3, 2)
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from service.learn.model.device import to_device
from service.types import Int64s

NAME = "baton_packed"

_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Older torch takes fewer key heads than query heads without being told."""

CALL_COST = 256 * 256
"""Score entries that cost about as much as one more call of the kernel."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows that one padded kernel call computes."""

    rows: int
    width: int
    token_N: Tensor | None
    """Tokens of these rows on the packed axis; None: all of them, in order."""
    slot_N: Tensor
    """The same tokens' places among `rows * width` slots."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the rows of a micro-batch lie on its token axis."""

    cu_seqlens: Tensor
    max_length: int
    buckets: tuple[Bucket, ...]
    """Empty where the variable-length kernel computes."""
    order_N: Tensor | None
    """From bucket order back to the packed order; None where they agree."""

    @staticmethod
    def of(offsets_R: Int64s, device: torch.device, variable_length: bool = False) -> Packing:
        """Plan the attention of rows with these bounds; rows without tokens are left out."""
        lengths_R = np.diff(offsets_R)
        kept_R = np.flatnonzero(lengths_R)
        bounds = np.concatenate([offsets_R[:1], offsets_R[1:][kept_R]]).astype(np.int32)
        cu_seqlens = to_device(bounds, device)
        max_length = int(lengths_R.max(initial=0))
        if variable_length:
            return Packing(cu_seqlens, max_length, (), None)
        buckets, order_N = _buckets(bounds.astype(np.int64), device)
        return Packing(cu_seqlens, max_length, buckets, order_N)


def _buckets(bounds: Int64s, device: torch.device) -> tuple[tuple[Bucket, ...], Tensor | None]:
    lengths_R = np.diff(bounds)
    by_length = np.argsort(-lengths_R, kind="stable")
    groups: list[list[int]] = []
    width = wasted = 0
    for row in by_length.tolist():
        length = int(lengths_R[row])
        wasted += width * width - length * length
        if not groups or wasted > CALL_COST:
            groups.append([])
            width, wasted = length, 0
        groups[-1].append(row)
    if len(groups) == 1:
        return (_bucket(bounds, np.arange(len(lengths_R)), device, whole=True),), None
    buckets = tuple(_bucket(bounds, np.asarray(rows), device, whole=False) for rows in groups)
    taken = torch.cat([bucket.token_N for bucket in buckets if bucket.token_N is not None])
    return buckets, torch.argsort(taken)


def _bucket(bounds: Int64s, rows: Int64s, device: torch.device, whole: bool) -> Bucket:
    lengths = (bounds[1:] - bounds[:-1])[rows]
    width = int(lengths.max())
    ends = np.cumsum(lengths)
    position = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    slot = np.repeat(np.arange(len(rows)) * width, lengths) + position
    token = None if whole else to_device(np.repeat(bounds[:-1][rows], lengths) + position, device)
    return Bucket(len(rows), width, token, to_device(slot, device))


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    packing: Packing,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one packed batch: [1, heads, N, head_dim] -> [1, N, heads, head_dim]."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if not packing.buckets:
        return _variable_length(query, key, value, packing, scaling).unsqueeze(0), None
    parts = [_padded(query, key, value, bucket, scaling) for bucket in packing.buckets]
    if packing.order_N is None:
        return parts[0].unsqueeze(0), None
    return torch.cat(parts).index_select(0, packing.order_N).unsqueeze(0), None


def _variable_length(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    cu, longest = packing.cu_seqlens, packing.max_length
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out = varlen_attn(query, key, value, cu, cu, longest, longest, scale=scaling, window_size=(-1, 0), **_GROUPED)
    return cast(Tensor, out)


def _padded(query: Tensor, key: Tensor, value: Tensor, bucket: Bucket, scaling: float | None) -> Tensor:
    query, key, value = (_spread(x, bucket) for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.slot_N)


def _spread(x: Tensor, bucket: Bucket) -> Tensor:
    """[N, heads, head_dim] -> [rows, heads, width, head_dim], zeros in the padding."""
    taken = x if bucket.token_N is None else x.index_select(0, bucket.token_N)
    slots = x.new_zeros(bucket.rows * bucket.width, *x.shape[1:]).index_copy(0, bucket.slot_N, taken)
    return slots.view(bucket.rows, bucket.width, *x.shape[1:]).transpose(1, 2)


# without a mask function of the same name Hugging Face makes no mask, and does not look for packed rows by itself
AttentionInterface.register(NAME, packed_attention)
