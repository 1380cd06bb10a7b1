"""Advantages to tokens on the device: bytes a second, against those of a copy."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.parts import Give
from service.learn.expand_to_tokens import expand_to_tokens, row_of_token

REPEATS = 20
SIZES = {"cuda": (1 << 27, 1 << 16), "cpu": (1 << 16, 1 << 8)}
"""Tokens and rows, by device."""


def measure(device: str, give: Give) -> None:
    """Index and mask are read and the value written; a copy reads and writes the index."""
    tokens, rows = SIZES[device]
    bounds = torch.linspace(0, tokens, rows + 1, device=device, dtype=torch.float64).long()
    row_N = row_of_token(bounds, tokens)
    mask_N = torch.ones(tokens, dtype=torch.bool, device=device)
    value_G = torch.randn(rows // 4, device=device)
    trajectory_R = torch.arange(rows, device=device) // 4
    moved = tokens * (row_N.element_size() + mask_N.element_size() + value_G.element_size())
    expanded = moved / seconds_of(lambda: expand_to_tokens(value_G, trajectory_R, row_N, mask_N))
    target = torch.empty_like(row_N)
    copied = 2 * tokens * row_N.element_size() / seconds_of(lambda: target.copy_(row_N))
    give({"tokens": tokens, "expand_gb_s": expanded / 1e9, "copy_gb_s": copied / 1e9, "fraction": expanded / copied})


def seconds_of(function: Callable[[], Tensor]) -> float:
    """Seconds of one call on the device, after three that warm up."""
    for _ in range(3):
        device = function().device
    synchronize(device)
    started = time.perf_counter()
    for _ in range(REPEATS):
        function()
    synchronize(device)
    return (time.perf_counter() - started) / REPEATS


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
