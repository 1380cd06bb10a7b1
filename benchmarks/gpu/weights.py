"""Weights between host and GPU: copies from pageable and from registered shared memory, and a rank's copy of its
weights."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

import torch

from actors.weights.part_buffers import PartBuffers
from benchmarks.gpu.figures import Give, Range, line, not_run
from benchmarks.gpu.steps import ROW_TOKENS, TOKENS, configured, seconds_of, shape_on
from benchmarks.shapes import SHAPES, shape_folder
from service.learn.model.policy import Policy

BYTES = {"cuda": 2 << 30, "cpu": 1 << 16}
PINNED = Range(0.7 * 64.0, 64.0)
"""GB/s of copies from and to registered memory: the link's rate in the data sheet, less the cost of its protocol."""
PAGEABLE = Range(2.0, 12.0)
"""GB/s of copies through CUDA's small buffer, which one core fills; 3.5 GB/s was measured in an engine."""


def measure(device: str, give: Give) -> None:
    """Measure GB/s; the first copy also creates and registers the buffers that later copies reuse."""
    there = torch.device(device)
    _from_shared_memory(there, give)
    with tempfile.TemporaryDirectory() as parent:
        folder = shape_folder(shape_on(device, SHAPES["Qwen3-1.7B"]), Path(parent))
        settings = configured(ROW_TOKENS[device], TOKENS[device]).learn
        policy = Policy(settings, folder, there, 0, 1, random_weights=True)
        buffers = PartBuffers()
        for version, name in enumerate(("first", "second")):
            started = time.perf_counter()
            buffers.copy(version, policy.shards(), policy.dtype)
            size = buffers.part.n_bytes
            rate = size / (time.perf_counter() - started) / 1e9
            expected = PINNED if name == "second" else None
            give(line(f"a rank's copy of {size / 1e9:.2f} GB, {name}", rate, "GB/s", expected))


def _from_shared_memory(device: torch.device, give: Give) -> None:
    size = BYTES[device.type]
    file = os.memfd_create("weights")
    os.ftruncate(file, size)
    shared = mmap.mmap(file, size)
    source = torch.frombuffer(shared, dtype=torch.uint8).fill_(1)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    rate = size / seconds_of(device, lambda: target.copy_(source)) / 1e9
    give(line("shared memory to GPU, pageable", rate, "GB/s", PAGEABLE))
    if device.type != "cuda":
        return give(not_run("shared memory to GPU, registered", "needs a CUDA GPU"))
    error = torch.cuda.cudart().cudaHostRegister(source.data_ptr(), size, 0)
    if int(error) != 0:
        return give(not_run("shared memory to GPU, registered", f"cudaHostRegister: {error}"))
    rate = size / seconds_of(device, lambda: target.copy_(source)) / 1e9
    give(line("shared memory to GPU, registered", rate, "GB/s", PINNED))
    torch.cuda.cudart().cudaHostUnregister(source.data_ptr())
    return None
