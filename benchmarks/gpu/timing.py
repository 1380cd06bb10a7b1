"""Measures the seconds of one call on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.gpu.steps import synchronize

REPEATS = {"cuda": 10, "cpu": 1}


def seconds_of(device: torch.device, function: Callable[[], object]) -> float:
    """Mean seconds of several calls, after two warm-up calls."""
    for _ in range(2):
        function()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(REPEATS[device.type]):
        function()
    synchronize(device)
    return (time.perf_counter() - started) / REPEATS[device.type]
