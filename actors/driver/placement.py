"""Where the trainer's ranks run: on nodes with their accelerator, and on as few nodes as they fit on."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from service.config import Config

ACCELERATOR_SHARE = 0.001
"""What a rank takes of `accelerator_type:H100`, a resource of which every node with such GPUs has 1."""

SHARED_GPU = 0.5
"""What Ray counts of a GPU for a rank, and for the engine that shares it."""


def cpus_each(gpus: int) -> float:
    """CPUs of a rank or an engine for Ray's placement: without GPUs half of one, so that two cores hold a small run."""
    return 1.0 if gpus else 0.5


def rank_bundle(config: Config, gpus: int) -> dict[str, float]:
    """What one rank needs of a node."""
    bundle = {"CPU": cpus_each(gpus)}
    if gpus:
        bundle["GPU"] = float(gpus)
    if config.trainer.accelerator is not None:
        bundle[f"accelerator_type:{config.trainer.accelerator}"] = ACCELERATOR_SHARE
    return bundle


def place_ranks(config: Config, gpus: int) -> PlacementGroup:
    """Room for all ranks at once, which they keep when they start again; nodes are filled one after the other.

    Where weights go by CUDA IPC, there is room for an engine beside each rank.
    """
    bundle = rank_bundle(config, gpus)
    if config.weights.transport == "ipc":
        bundle["CPU"] += cpus_each(gpus)
    return placement_group([bundle] * config.trainer.ranks, strategy="PACK")


def rank_options(config: Config, gpus: int, room: PlacementGroup, rank: int) -> dict[str, Any]:
    """Options of the actor of one rank."""
    bundle = rank_bundle(config, gpus)
    if gpus and config.weights.transport == "ipc":
        bundle["GPU"] = SHARED_GPU
    return {
        "name": f"trainer-{rank}",
        "num_cpus": bundle.pop("CPU"),
        "num_gpus": bundle.pop("GPU", 0),
        "resources": bundle,
        "max_restarts": -1,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=rank),
    }


def beside_rank(config: Config, room: PlacementGroup, rank: int) -> dict[str, Any]:
    """Options of an engine's actor, on the same GPU as a rank where weights go by CUDA IPC, else anywhere."""
    if config.weights.transport != "ipc":
        return {}
    here = PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=rank)
    return {"num_gpus": SHARED_GPU, "scheduling_strategy": here}


def missing_resources(config: Config, gpus: int) -> str:
    """What all ranks and engines need beyond what the cluster has now, in words; empty where it has enough."""
    has = ray.cluster_resources()
    needs: dict[str, float] = {}
    for name, amount in rank_bundle(config, gpus).items():
        needs[name] = amount * config.trainer.ranks
    needs["CPU"] += config.generator.engines * cpus_each(gpus)
    if gpus and config.weights.transport != "ipc":
        needs["GPU"] += gpus * config.generator.tensor_parallel_size * config.generator.engines
    short = {name: amount for name, amount in needs.items() if has.get(name, 0) < amount}
    return ", ".join(f"{amount:g} {name} (it has {has.get(name, 0):g})" for name, amount in short.items())
