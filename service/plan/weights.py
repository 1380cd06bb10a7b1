"""Predicts how long an update of the engines' weights takes, by the transport of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from service.plan.machine.costs import WEIGHTS
from service.plan.machine.device import Device


@dataclass(frozen=True)
class Update:
    """Seconds that an update of the engines' weights takes, as the trainer and the engines experience it."""

    trainer: float
    """Seconds for which the trainer does nothing but send the weights."""
    pause: float
    """Seconds for which an engine generates nothing."""
    arrival: float
    """Seconds from the end of the optimizer step until the engines serve the weights."""


def update(transport: str, weight_bytes: float, device: Device, nodes: int, rank_gpus: int, engine_gpus: int) -> Update:
    """Predict how long an update of the engines' weights takes.

    Of the `weight_bytes`, each of the trainer's `rank_gpus` GPUs sends an equal part, and each of an engine's
    `engine_gpus` GPUs receives an equal part.
    """
    costs = WEIGHTS
    if transport == "memory":
        copied, pause = weight_bytes / rank_gpus / costs["copied"], weight_bytes / engine_gpus / costs["into_an_engine"]
        by_network = nodes > 1 and device.cores is None
        arrival = weight_bytes / costs["to_a_node"] if by_network else 0.0
        return Update(copied, pause, copied + arrival + pause)
    seconds = weight_bytes / device.link + costs["calls"]
    return Update(seconds, seconds, seconds)
