"""Predicts the time to send new weights to the engines with each transport."""

from __future__ import annotations

from dataclasses import dataclass

from service.plan.machine.costs import WEIGHTS
from service.plan.machine.device import Device


@dataclass(frozen=True)
class Update:
    """Duration of an update of the engines, in seconds."""

    trainer: float
    """Seconds of the update in which the trainer does nothing else."""
    pause: float
    """Seconds of the update in which an engine generates nothing."""
    arrival: float
    """Seconds from the end of the optimizer step until the engines serve the weights."""


def update(transport: str, weight_bytes: float, device: Device, nodes: int, rank_gpus: int, engine_gpus: int) -> Update:
    """The duration of an update. `rank_gpus` GPUs share the bytes that the trainer sends; `engine_gpus` GPUs share the
    bytes that an engine gets."""
    costs = WEIGHTS
    if transport == "memory":
        copied, pause = weight_bytes / rank_gpus / costs["copied"], weight_bytes / engine_gpus / costs["into_an_engine"]
        by_network = nodes > 1 and device.cores is None
        arrival = weight_bytes / costs["to_a_node"] if by_network else 0.0
        return Update(copied, pause, copied + arrival + pause)
    seconds = weight_bytes / device.link + costs["calls"]
    return Update(seconds, seconds, seconds)
