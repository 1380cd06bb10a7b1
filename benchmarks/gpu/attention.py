"""Causal attention of packed rows alone: FlashAttention 2 and 4 as the learner calls them, and Flex attention."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.gpu import suite
from benchmarks.gpu.expected import attention_flops, attention_rates
from benchmarks.gpu.figures import Range, line, not_run
from benchmarks.gpu.parts import Give
from benchmarks.gpu.steps import seconds_of
from service.learn.attention_layout import Packing
from service.learn.model import flash
from service.learn.model.attention import packed_attention

TOKENS = {"cuda": 32768, "cpu": 64}
LENGTHS = {"cuda": (1024, 2048, 8192, 32768), "cpu": (16, 64)}
HEADS, KV_HEADS = 32, 8
HEAD_DIM = {"cuda": 128, "cpu": 16}


def measure(device: str, give: Give) -> None:
    """Run the kernels' tests, then measure their rates, because the speed of a wrong kernel means nothing."""
    suite.run(give, "tests/gpu/test_learn.py", "-k", "variable_length_kernels")
    there = torch.device(device)
    works = device == "cuda" and flash.begin(there)
    kernels = flash._kernels
    for length in LENGTHS[device]:
        bounds = np.arange(TOKENS[device] // length + 1, dtype=np.int64) * length
        packing = Packing.of(bounds, there, variable_length=device == "cuda")
        _with_flash("FA2", None, _inputs(there), packing, length, give)
        if works:
            _with_flash("FA4", kernels, _inputs(there), packing, length, give)
        else:
            give(not_run(f"FA4, rows of {length}", f"flash-attn-4 {flash.VERSION} does not compute here"))
    for length in LENGTHS[device][1:3]:  # last and few, because each length is compiled separately
        _with_flex(_inputs(there), length, give)


def _inputs(device: torch.device) -> list[Tensor]:
    shapes = [(1, heads, TOKENS[device.type], HEAD_DIM[device.type]) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_() for shape in shapes]


def _with_flash(name: str, kernels: object, inputs: list[Tensor], packing: Packing, length: int, give: Give) -> None:
    query, key, value = inputs

    def call() -> Tensor:
        return packed_attention(torch.nn.Identity(), query, key, value, None, packing)[0]

    with patch.object(flash, "_kernels", kernels):
        _give(name, call, inputs, length, give)


def _with_flex(inputs: list[Tensor], length: int, give: Give) -> None:
    there, tokens, on_gpu = inputs[0].device, inputs[0].shape[2], inputs[0].is_cuda
    inputs = inputs if on_gpu else [x.detach() for x in inputs]  # it has no backward pass on CPU

    def in_row(_b: Tensor, _h: Tensor, of_query: Tensor, of_key: Tensor) -> Tensor:
        return (of_query >= of_key) & (of_query // length == of_key // length)

    kernel = torch.compile(flex_attention) if on_gpu else flex_attention
    mask = create_block_mask(in_row, None, None, tokens, tokens, device=there)
    _give("Flex", lambda: kernel(*inputs, block_mask=mask, enable_gqa=True), inputs, length, give)


def _give(name: str, call: Callable[[], Tensor], inputs: list[Tensor], length: int, give: Give) -> None:
    """Report the rates of the forward pass, and of the backward pass alone."""
    there, (_, heads, tokens, head_dim) = inputs[0].device, inputs[0].shape
    flops = attention_flops(tokens // length, length, heads, head_dim)
    with torch.no_grad():
        forward = seconds_of(there, call)
    rates = {"forward": flops[0] / forward}
    if inputs[0].requires_grad:
        of_out = torch.ones_like(call())
        both = seconds_of(there, lambda: torch.autograd.grad(call(), inputs, of_out))
        rates["backward"] = flops[1] / max(both - forward, 1e-9)
    expected = [None] * 2 if name == "Flex" else attention_rates(name, length)
    for (way, rate), limits in zip(rates.items(), expected, strict=False):
        told = None if limits is None else Range(limits.low / 1e12, limits.high / 1e12)
        give(line(f"{name}, rows of {length}, {way}", rate / 1e12, "TFLOP/s", told))
