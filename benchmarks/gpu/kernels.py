"""What the GPU reaches, and the learner's kernels alone: attention of packed rows, and the output head."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.expected import (
    BANDWIDTH,
    H100,
    LARGE_PRODUCTS,
    MEASURED,
    attention_flops,
    attention_rates,
    head_seconds,
)
from benchmarks.gpu.figures import Give, Range, line, not_run
from benchmarks.gpu.parts import run_tests
from benchmarks.gpu.steps import seconds_of
from service.learn import compile
from service.learn.attention_layout import Packing
from service.learn.model import flash
from service.learn.model.attention import packed_attention
from service.learn.model.logprob import token_logprobs

SIDE = {"cuda": 8192, "cpu": 64}
COPIED = {"cuda": 1 << 32, "cpu": 1 << 16}
"""Bytes that are copied."""
TOKENS = {"cuda": 32768, "cpu": 64}
LENGTHS = {"cuda": (1024, 2048, 8192, 32768), "cpu": (16, 64)}
HEADS, KV_HEADS = 32, 8
HEAD_DIM = {"cuda": 128, "cpu": 16}
HEAD_SIZES = {"cuda": (8192, 1024, 151936), "cpu": (8, 16, 100)}
"""Loss tokens, hidden size and vocabulary of a micro-batch of Qwen3-0.6B."""


def machine(device: str, give: Give) -> None:
    """Measure two rates: a copy reads and writes its bytes; a product of square matrices has 2 n^3 FLOPs."""
    there, side, copied = torch.device(device), SIDE[device], COPIED[device]
    source = torch.ones(copied, dtype=torch.uint8, device=there)
    target = torch.empty_like(source)
    seconds = seconds_of(there, lambda: target.copy_(source))
    give(line("copy", 2 * copied / seconds / 1e12, "TB/s", Range(BANDWIDTH / 1e12, H100.bandwidth / 1e12)))
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=there) for _ in range(2))
    flops = 2.0 * side**3 / seconds_of(there, lambda: left @ right)
    reached = Range((1 - MEASURED) * LARGE_PRODUCTS / 1e12, H100.flops / 1e12)
    give(line(f"product of {side} x {side}", flops / 1e12, "TFLOP/s", reached))


def attention(device: str, give: Give) -> None:
    """Run the kernels' tests, then measure their rates, because the speed of a wrong kernel means nothing."""
    run_tests(give, "tests/gpu/test_learn.py", "-k", "variable_length_kernels")
    there = torch.device(device)
    works = device == "cuda" and flash.begin(there)
    kernels = {"FA2": None, "FA4": flash._kernels}
    shapes = [(1, heads, TOKENS[device], HEAD_DIM[device]) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, dtype=torch.bfloat16, device=there).requires_grad_() for shape in shapes]
    for length in LENGTHS[device]:
        bounds = np.arange(TOKENS[device] // length + 1, dtype=np.int64) * length
        packing = Packing.of(bounds, there, variable_length=device == "cuda")
        for name, kernel in kernels.items():
            if name == "FA4" and not works:
                give(not_run(f"FA4, rows of {length}", f"flash-attn-4 {flash.VERSION} does not compute here"))
                continue
            with patch.object(flash, "_kernels", kernel):
                _both_passes(
                    name,
                    lambda to=packing: packed_attention(torch.nn.Identity(), *inputs, None, to)[0],
                    inputs,
                    length,
                    give,
                )


def _both_passes(name: str, call: Callable[[], Tensor], inputs: list[Tensor], length: int, give: Give) -> None:
    """Report the rates of the forward pass, and of the backward pass alone."""
    there, (_, heads, tokens, head_dim) = inputs[0].device, inputs[0].shape
    flops = attention_flops(tokens // length, length, heads, head_dim)
    with torch.no_grad():
        forward = seconds_of(there, call)
    of_out = torch.ones_like(call())
    backward = seconds_of(there, lambda: torch.autograd.grad(call(), inputs, of_out)) - forward
    ways = zip(
        ("forward", "backward"), (forward, max(backward, 1e-9)), flops, attention_rates(name, length), strict=True
    )
    for way, seconds, of_way, limits in ways:
        told = Range(limits.low / 1e12, limits.high / 1e12)
        give(line(f"{name}, rows of {length}, {way}", of_way / seconds / 1e12, "TFLOP/s", told))


def head(device: str, give: Give) -> None:
    """Measure the microseconds per loss token of both passes of the output head, compiled and not."""
    there, (tokens, hidden, vocabulary) = torch.device(device), HEAD_SIZES[device]
    states, weight = (
        torch.randn(n, hidden, dtype=torch.bfloat16, device=there).requires_grad_() for n in (tokens, vocabulary)
    )
    ids, ones = torch.zeros(tokens, dtype=torch.int64, device=there), torch.ones(tokens, device=there)

    def both_passes() -> None:
        found = token_logprobs(states, weight, ids, ones)
        torch.autograd.backward([found.logprob_M, found.entropy_M], [ones, ones])
        states.grad = weight.grad = None

    for compiled in (True, False):
        name = f"head, {'compiled' if compiled else 'not compiled'}"
        if compiled and not compile.compiler_works(there):
            give(not_run(name, "the machine's compiler does not work"))
            continue
        with patch.object(compile, "compiler_works", lambda _, works=compiled: works):
            seconds = seconds_of(there, both_passes) / tokens
        low, high = head_seconds(hidden, vocabulary, compiled)
        give(line(name, 1e6 * seconds, "us a loss token", Range(1e6 * low, 1e6 * high)))
