"""The rates that the GPU reaches: of a copy in its memory, and of a large matrix product."""

from __future__ import annotations

import torch

from benchmarks.gpu.expected import BANDWIDTH, H100, LARGE_PRODUCTS, MEASURED
from benchmarks.gpu.figures import Range, line
from benchmarks.gpu.parts import Give
from benchmarks.gpu.steps import seconds_of

SIDE = {"cuda": 8192, "cpu": 64}
COPIED = {"cuda": 1 << 32, "cpu": 1 << 16}
"""Bytes that are copied."""


def measure(device: str, give: Give) -> None:
    """Measure the two rates. A copy reads and writes its bytes; a product of square matrices has 2 n^3 FLOPs."""
    there, side, copied = torch.device(device), SIDE[device], COPIED[device]
    source = torch.ones(copied, dtype=torch.uint8, device=there)
    target = torch.empty_like(source)
    seconds = seconds_of(there, lambda: target.copy_(source))
    give(line("copy", 2 * copied / seconds / 1e12, "TB/s", Range(BANDWIDTH / 1e12, H100.bandwidth / 1e12)))
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=there) for _ in range(2))
    flops = 2.0 * side**3 / seconds_of(there, lambda: left @ right)
    reached = Range((1 - MEASURED) * LARGE_PRODUCTS / 1e12, H100.flops / 1e12)
    give(line(f"product of {side} x {side}", flops / 1e12, "TFLOP/s", reached))
