"""Training steps: of a learner with the default settings, on a mesh of one rank, and of layers with experts.

Model FLOPs utilisation: three times the FLOPs of the forward pass, divided by the time and by an H100's dense bfloat16
peak. A mesh of one rank is the code path of runs on several GPUs.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import psutil
import torch
from torch._dynamo.utils import counters

from benchmarks.gpu.expected import EXPERTS, UTILISATION, Step, sharded_over_unsharded
from benchmarks.gpu.figures import Give, Range, line
from benchmarks.gpu.parts import FOLDER
from benchmarks.gpu.steps import MICRO_BATCHES, TOKENS, Trained, shape_on, trained
from benchmarks.learn import made_row, micro_batch_of, mini_batch_of
from benchmarks.shapes import SHAPES
from service.learn.model.attention import use_fastest_attention
from service.learn.profile import StepProfile

MEMORY = Range(0.6, 1.1)
"""Expected ratio of the peak of reserved memory to the arithmetic of `baton plan`; compiled layers take less."""
KINDS = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
"""Kinds of events in a trace that ran on the device."""
SHARDED: tuple[tuple[str, int | None], ...] = (("Qwen3-1.7B", None), ("Qwen3-8B", 8))
"""Models, each with its number of layers; None: all layers."""
GRAPHS = 4
"""Compiled graphs of a model: one of all layers, and one of each function that a GPU runs compiled."""
EXPERT_LAYERS = 3
COLD = Range(10.0, 120.0)
"""Seconds in which a layer with its two layouts, FlashAttention's kernels and the head's functions are compiled."""
COPY = Range(0.3, 2.0)
"""Seconds of a copy of 20 GB into registered memory, at 10 to 64 GB/s."""


def learner(device: str, give: Give, name: str = "Qwen3-1.7B") -> None:
    """Measure the steps of a shape, and the time in one of them in which no kernel runs."""
    there, shape = torch.device(device), shape_on(device, SHAPES[name])
    with trained(there, shape) as steps:
        used = Step.of(shape, device).utilisation(steps.seconds)
        note = f"{steps.note}, {use_fastest_attention(there)}"
        give(line(f"{name}: utilisation", used, "of peak", UTILISATION[name], note))
        give(line(f"{name}: step", 1e3 * steps.seconds, "ms"))
        give(line(f"{name}: tokens", MICRO_BATCHES * TOKENS[device] / steps.seconds, "tokens/s"))
        give(line(f"{name}: first step", steps.first_seconds, "s"))
        give(line(f"{name}: peak over estimate", steps.peak_bytes / steps.estimated_bytes, "", MEMORY))
        file = _recorded(steps)
    written = Path(os.environ.get(FOLDER, ".")) / f"step-{name}.json.gz"
    written.write_bytes(file)
    idle = idle_share(kernels(file, device))
    give(line(f"{name}: time without a kernel", idle, "of the step", Range(0.0, 0.1), f"trace: {written.name}"))


def small(device: str, give: Give) -> None:
    """As `learner`, of a smaller shape."""
    learner(device, give, "Qwen3-0.6B")


def graphs(device: str, give: Give) -> None:
    """Measure how long the trial of a rank compiles if nothing is cached, and which graphs further micro-batches
    need."""
    shape = shape_on(device, SHAPES["Qwen3-8B"], 8)
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
        counters.clear()
        with trained(torch.device(device), shape, sharded=True, trial=True) as steps:
            give(line("8 layers of Qwen3-8B: trial, nothing cached", steps.trial_seconds, "s", COLD))
            compiled = counters["stats"]["unique_graphs"]
            give(line("8 layers of Qwen3-8B: first step after it", steps.first_seconds, "s"))
            learner = steps.learner
            for kind, row in (("empty", []), ("with a shared prefix", [made_row(np.arange(64), 8)] * 2)):
                micro = micro_batch_of(row, range(len(row)))
                with learner.policy.gradients_dropped_on_error():
                    learner.accumulate(mini_batch_of([micro], max(1, len(row))))
                learner.policy.master_weights.drop_gradients()
                more = counters["stats"]["unique_graphs"] - compiled
                give(line(f"8 layers of Qwen3-8B: further graphs, micro-batch {kind}", more, "", Range(0, 0)))


def checkpoint(device: str, give: Give) -> None:
    """Measure two checkpoints: the copy, which holds up the steps, and the rate of the disk; the second copy reuses the
    memory of the first."""
    with (
        trained(torch.device(device), shape_on(device, SHAPES["Qwen3-1.7B"])) as steps,
        tempfile.TemporaryDirectory(dir=os.environ.get(FOLDER)) as folder,
    ):
        for name in ("first", "second"):
            began, held = time.perf_counter(), psutil.Process().memory_info().rss
            steps.learner.save(Path(folder) / name, background=True)
            copied, grown = time.perf_counter() - began, max(0, psutil.Process().memory_info().rss - held)
            steps.learner.writer.finish()
            size = sum(file.stat().st_size for file in (Path(folder) / name).iterdir())
            rate = size / 1e9 / (time.perf_counter() - began - copied)
            give(line(f"{name} checkpoint: copy", copied, "s", None if name == "first" else COPY))
            give(line(f"{name} checkpoint: written", rate, "GB/s", note=f"{size / 1e9:.2f} GB"))
            give(line(f"{name} checkpoint: further host memory", grown / size, "of its bytes"))


def _recorded(steps: Trained) -> bytes:
    """One step as a Chrome trace, compressed by gzip."""
    profile = StepProfile(1, steps.learner.policy.device)
    with profile.step():
        steps.learner.step(steps.batch)
        if steps.learner.policy.device.type == "cuda":
            torch.cuda.synchronize()
    if profile.file is None:
        raise RuntimeError("the profiler recorded nothing")
    return profile.file


def kernels(file: bytes, device: str) -> list[tuple[float, float]]:
    """Start and end in seconds of everything that ran on the device."""
    events = json.loads(gzip.decompress(file))["traceEvents"]
    ran = [event for event in events if event.get("ph") == "X" and event.get("cat") in KINDS[device]]
    return [(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in ran]


def idle_share(ran: Iterable[tuple[float, float]]) -> float:
    """The fraction of the time from the first start to the last end in which nothing ran; 0 if nothing ran."""
    spans = sorted(ran)
    latest, idle = spans[0][0] if spans else 0.0, 0.0
    for start, end in spans:
        idle += max(0.0, start - latest)
        latest = max(latest, end)
    return idle / (latest - spans[0][0]) if idle else 0.0


def sharded(device: str, give: Give) -> None:
    """Measure each shape without and with sharding."""
    there = torch.device(device)
    for model, layers in SHARDED:
        name = model if layers is None else f"{layers} layers of {model}"
        shape = shape_on(device, SHAPES[model], layers)
        counted = Step.of(shape, device)
        with trained(there, shape) as steps:
            plain, same = steps.seconds, steps.checkpointing
            used, limits = counted.utilisation(plain), UTILISATION["Qwen3-1.7B"]
            give(line(f"{name}: utilisation", used, "of peak", limits, steps.note))
        counters.clear()
        with trained(there, shape, same, sharded=True, reshard_after_forward=True) as steps:
            over, note = steps.seconds / plain, steps.note
            graphs = counters["stats"]["unique_graphs"]
        give(line(f"{name}: sharded over unsharded", over, "", sharded_over_unsharded(counted, plain)))
        give(line(f"{name}: sharded, utilisation", counted.utilisation(over * plain), "of peak", note=note))
        give(line(f"{name}: graphs, sharded", graphs, "", Range(GRAPHS, GRAPHS)))


def experts(device: str, give: Give) -> None:
    """Measure layers of Qwen3-30B-A3B, eager and compiled around the experts. The utilisation counts only the experts
    to which a token is routed."""
    there, shape = torch.device(device), shape_on(device, SHAPES["Qwen3-30B-A3B"], EXPERT_LAYERS)
    counted = Step.of(shape, device)
    for compiled in (False, True):
        name = f"{EXPERT_LAYERS} layers, {'compiled around the experts' if compiled else 'as written'}"
        with trained(there, shape, compile=compiled and device == "cuda") as steps:
            give(line(name, counted.utilisation(steps.seconds), "of peak", EXPERTS, steps.note))
            give(line(f"{name}: step", 1e3 * steps.seconds, "ms"))
