"""How long new weights take to the engines, by transport."""

from __future__ import annotations

from dataclasses import dataclass

from service.plan.machine.device import Device

COPIED, TO_A_NODE, INTO_AN_ENGINE = 2.2e9, 0.48e9, 3.5e9
"""Bytes/s of `weights.transport: memory`, calls included: from each rank to the memory of its host, while the trainer
waits; into the shared memory of the engines' node; into an engine while it pauses. Measured on one H100 with 1.64 GB
(`python -m benchmarks.gpu`); nodes over a network were not."""
CALLS = 0.3
"""Seconds of the calls of an update by the other transports, whatever the bytes; assumed."""


@dataclass(frozen=True)
class Update:
    """Seconds of an update of the engines."""

    trainer: float
    """While which the trainer does nothing else."""
    pause: float
    """While which an engine generates nothing."""
    arrival: float
    """From the end of the step until the engines serve the weights."""


def update(transport: str, weight_bytes: float, device: Device, nodes: int, rank_gpus: int, engine_gpus: int) -> Update:
    """An update by a transport; `rank_gpus` share the bytes that leave the trainer, `engine_gpus` an engine's."""
    if transport == "memory":
        fast = device.cores is not None  # one machine, and no copy to a GPU
        copied, pause = weight_bytes / rank_gpus / COPIED, weight_bytes / engine_gpus / INTO_AN_ENGINE
        arrival = 0.0 if fast else weight_bytes / TO_A_NODE
        return Update(copied, pause, copied + arrival + pause)
    rate = device.link if transport == "ipc" or nodes == 1 else device.network
    seconds = weight_bytes / rate + CALLS
    return Update(seconds, seconds, seconds)
