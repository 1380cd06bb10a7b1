"""Three layers of a mixture of experts (Qwen3-30B-A3B): eager layers, and layers compiled around the experts."""

from __future__ import annotations

import torch

from benchmarks.gpu.expected import EXPERTS, Step
from benchmarks.gpu.figures import line
from benchmarks.gpu.parts import Give
from benchmarks.gpu.steps import QWEN3_30B_A3B, shape_on, trained

LAYERS = 3


def measure(device: str, give: Give) -> None:
    """Measure the utilisation; it counts only the experts to which a token is routed."""
    there, shape = torch.device(device), shape_on(device, QWEN3_30B_A3B, LAYERS)
    counted = Step.of(shape, device)
    for compiled in (False, True):
        name = "compiled around the experts" if compiled else "as written"
        with trained(there, shape, compile=compiled and device == "cuda") as steps:
            used = counted.utilisation(steps.seconds)
            give(line(f"{LAYERS} layers, {name}", used, "of peak", EXPERTS, steps.note))
            give(line(f"{LAYERS} layers, {name}: step", 1e3 * steps.seconds, "ms"))
