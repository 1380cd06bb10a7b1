"""Training steps with the default settings: model FLOPs utilisation, peak memory, and the trace of one step.

Model FLOPs utilisation: three times the FLOPs of the forward pass, divided by the time and by an H100's dense bfloat16
peak.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from benchmarks.gpu.expected import UTILISATION, Step
from benchmarks.gpu.figures import Range, line
from benchmarks.gpu.parts import FOLDER, Give
from benchmarks.gpu.steps import MICRO_BATCHES, TOKENS, shape_on, trained
from benchmarks.gpu.trace import gaps, kernels, recorded
from benchmarks.shapes import SHAPES
from service.learn.model.attention import use_fastest_attention

MEMORY = Range(0.6, 1.1)
"""Expected ratio of the peak of reserved memory to the arithmetic of `baton plan`; compiled layers take less."""
LONGEST = 10


def measure(device: str, give: Give) -> None:
    """Measure each shape, and the gaps in one of its steps."""
    there = torch.device(device)
    for name in ("Qwen3-0.6B", "Qwen3-1.7B"):
        shape = shape_on(device, SHAPES[name])
        counted = Step.of(shape, device)
        with trained(there, shape) as steps:
            used = counted.utilisation(steps.seconds)
            note = f"{steps.note}, {use_fastest_attention(there)}"
            give(line(f"{name}: utilisation", used, "of peak", UTILISATION[name], note))
            give(line(f"{name}: step", 1e3 * steps.seconds, "ms"))
            give(line(f"{name}: tokens", MICRO_BATCHES * TOKENS[device] / steps.seconds, "tokens/s"))
            give(line(f"{name}: first step", steps.first_seconds, "s"))
            give(line(f"{name}: peak over estimate", steps.peak_bytes / steps.estimated_bytes, "", MEMORY))
            file = recorded(steps.learner, steps.batch)
        written = Path(os.environ.get(FOLDER, ".")) / f"step-{name}.json.gz"
        written.write_bytes(file)
        found, idle = gaps(kernels(file, device))
        give(line(f"{name}: time without a kernel", idle, "of the step", Range(0.0, 0.1), f"trace: {written.name}"))
        for number, gap in enumerate(found[:LONGEST], 1):
            note = f"after {gap.after}, before {gap.before}"
            give(line(f"{name}: gap {number}", 1e6 * gap.seconds, "us", note=note))
