"""FlashAttention 4 as torch operators, with gradients, and with fake results that compiled layers need.

Torch's own integration (`activate_flash_attention_impl`) does not fit this version of the package: it expects two
results instead of five. It also does not pass the length of the longest row to the backward pass, which would then
assume that each row has all tokens.
"""

from __future__ import annotations

import logging
from importlib import import_module, metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

VERSION = "4.0.0b36"
"""Required version of the package flash-attn-4, because private functions of this version are called."""
CAPABILITIES = (9, 10)
"""Major compute capabilities of the GPUs on which the package has a forward and a backward pass: Hopper and
Blackwell."""

_kernels: Any = None
"""The package's module; None while FlashAttention 4 is not in use."""


def begin(device: torch.device) -> bool:
    """Use FlashAttention 4 from now on if the package is installed, supports this GPU, and computes a small example
    correctly; returns True if so. If the package supports the GPU but does not work, a warning gives the reason."""
    global _kernels
    try:
        installed = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return False
    if torch.cuda.get_device_capability(device)[0] not in CAPABILITIES:
        return False
    try:
        if installed != VERSION:
            raise ImportError(f"its version is {installed}, not {VERSION}")
        _kernels = import_module("flash_attn.cute.interface")
        _try_out(device)
    except Exception as error:  # noqa: BLE001 - whatever its compiler raises, other kernels can compute
        _kernels = None
        why = (str(error).strip().splitlines() or [""])[0]
        log.warning("FlashAttention 4 is installed and cannot be used (%s: %s)", type(error).__name__, why)
    return _kernels is not None


def takes(query: Tensor) -> bool:
    """True if FlashAttention 4 is in use and supports the device and head size of these queries
    [T, heads, head_dim]."""
    head_dim = query.shape[-1]
    return _kernels is not None and query.is_cuda and head_dim % 8 == 0 and (head_dim <= 128 or head_dim == 256)


@torch.library.custom_op("baton::flash4_varlen_attn", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, cu_queries: Tensor, cu_keys: Tensor, longest_query: int,
    longest_key: int, scale: float, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention: the output [T, heads, head_dim], and each query's log-sum-exp [heads, T]. T: tokens.

    `window`: number of earlier tokens that a token attends to; -1: all.
    """
    named = _named(cu_queries, cu_keys, longest_query, longest_key, scale, window=window)
    out, log_sum, *_ = _kernels._flash_attn_fwd(query, key, value, return_lse=True, **named)
    return out, log_sum


@torch.library.custom_op("baton::flash4_varlen_attn_backward", mutates_args=())
def attend_backward(
    of_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, cu_queries: Tensor,
    cu_keys: Tensor, longest_query: int, longest_key: int, scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value; `of_out`: the gradient of the output."""
    named = _named(cu_queries, cu_keys, longest_query, longest_key, scale, window=window)
    of_query, of_key, of_value = _kernels._flash_attn_bwd(query, key, value, out, of_out, log_sum, **named)
    return of_query, of_key, of_value


def _named(*bounds_and_scale: Any, window: int) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale")
    left, right = (None, None) if window < 0 else (window, 0)
    others = {"causal": window < 0, "window_size_left": left, "window_size_right": right}
    return dict(zip(names, bounds_and_scale, strict=True)) | others


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads = query.shape[:2]
    return query.new_empty(tokens, heads, value.shape[-1]), query.new_empty(heads, tokens, dtype=torch.float32)


@attend_backward.register_fake
def _(of_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:5])
    ctx.others = inputs[5:]


def _gradients(ctx: Any, of_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *attend_backward(of_out, *ctx.saved_tensors, *ctx.others), *[None] * 6


attend.register_autograd(_gradients, setup_context=_keep)


def _try_out(device: torch.device) -> None:
    """Compute attention over two rows, and its gradients.

    Raises:
        ArithmeticError: the output or a gradient is wrong.
    """
    bounds, heads = torch.tensor([0, 5, 200], dtype=torch.int32, device=device), (4, 2, 2)
    waves = [torch.arange(200 * n * 64, device=device).sin().view(200, n, 64).bfloat16() for n in heads]
    ours, exact = ([x.to(dtype).requires_grad_() for x in waves] for dtype in (torch.bfloat16, torch.float32))
    with torch.enable_grad():
        out, _ = attend(*ours, bounds, bounds, 195, 195, 0.125, -1)
        rows = ([x[part].transpose(0, 1) for x in exact] for part in (slice(5), slice(5, 200)))
        each = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125, enable_gqa=True) for q, k, v in rows
        ]
        expected = torch.cat(each, 1).transpose(0, 1)
    found = (out, *torch.autograd.grad(out, ours, out.detach()))
    right = (expected, *torch.autograd.grad(expected, exact, expected.detach()))
    if any((x.float() - y).norm() > 0.05 * y.norm() for x, y in zip(found, right, strict=True)):
        raise ArithmeticError("a small attention came out wrong")
