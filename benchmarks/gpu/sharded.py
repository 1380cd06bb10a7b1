"""The code path of runs on several GPUs, on one GPU: FSDP2 on a mesh of one rank, against training without sharding."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters

from benchmarks.gpu.expected import UTILISATION, Step, sharded_over_unsharded
from benchmarks.gpu.figures import Range, line
from benchmarks.gpu.parts import Give
from benchmarks.gpu.steps import shape_on, trained
from benchmarks.shapes import SHAPES

MEASURED: tuple[tuple[str, int | None], ...] = (("Qwen3-1.7B", None), ("Qwen3-8B", 8))
"""Models, each with its number of layers; None: all layers."""
GRAPHS = 4
"""Compiled graphs of a model: one of all layers, and one of each function that a GPU runs compiled."""


def measure(device: str, give: Give) -> None:
    """Measure each shape without and with sharding."""
    there = torch.device(device)
    for model, layers in MEASURED:
        name = model if layers is None else f"{layers} layers of {model}"
        shape = shape_on(device, SHAPES[model], layers)
        counted = Step.of(shape, device)
        with trained(there, shape) as steps:
            plain, same = steps.seconds, steps.checkpointing
            used, limits = counted.utilisation(plain), UTILISATION["Qwen3-1.7B"]
            give(line(f"{name}: utilisation", used, "of peak", limits, steps.note))
        counters.clear()
        with trained(there, shape, same, sharded=True, reshard_after_forward=True) as steps:
            sharded, note = steps.seconds, steps.note
            graphs = counters["stats"]["unique_graphs"]
        give(line(f"{name}: sharded over unsharded", sharded / plain, "", sharded_over_unsharded(counted, plain)))
        give(line(f"{name}: sharded, utilisation", counted.utilisation(sharded), "of peak", note=note))
        give(line(f"{name}: graphs, sharded", graphs, "", Range(GRAPHS, GRAPHS)))
