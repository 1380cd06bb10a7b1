"""Places the trainer's ranks and the engines on nodes: ranks on nodes with their accelerator, on as few as possible."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from service.config import Config

ACCELERATOR_SHARE = 0.001
"""Amount of the resource `accelerator_type:H100` for a rank; every node with such GPUs has 1."""

SHARED_GPU = 0.5
"""GPUs of a rank, and of an engine, that share one."""


def cpus_each(gpus: int) -> float:
    """CPUs of a rank or an engine; half a CPU without GPUs, so that a small run fits on two cores."""
    return 1.0 if gpus else 0.5


def rank_bundle(config: Config, gpus: int) -> dict[str, float]:
    """The resources of one rank."""
    bundle = {"CPU": cpus_each(gpus)}
    if gpus:
        bundle["GPU"] = float(gpus)
    if config.trainer.accelerator is not None:
        bundle[f"accelerator_type:{config.trainer.accelerator}"] = ACCELERATOR_SHARE
    return bundle


def place_ranks(config: Config, gpus: int) -> PlacementGroup:
    """A placement group with a bundle for each rank, which the ranks keep when they restart; it fills nodes in turn.

    With CUDA IPC, each bundle has room for an engine too.
    """
    bundle = rank_bundle(config, gpus)
    if config.weights.transport == "ipc":
        bundle["CPU"] += cpus_each(gpus)
    return placement_group([bundle] * config.trainer.ranks, strategy="PACK")


def rank_options(config: Config, gpus: int, room: PlacementGroup, rank: int) -> dict[str, Any]:
    """Actor options of one rank."""
    bundle = rank_bundle(config, gpus)
    if gpus and config.weights.transport == "ipc":
        bundle["GPU"] = SHARED_GPU
    # micro-batches differ in length, which leaves holes between fixed segments; CUDA IPC shares fixed segments only
    movable = gpus and config.weights.transport != "ipc"
    env_vars = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if movable else {}
    return {
        "name": f"trainer-{rank}",
        "num_cpus": bundle.pop("CPU"),
        "num_gpus": bundle.pop("GPU", 0),
        "resources": bundle,
        "max_restarts": -1,
        "runtime_env": {"env_vars": env_vars},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=rank),
    }


def beside_rank(config: Config, room: PlacementGroup, rank: int) -> dict[str, Any]:
    """Actor options of an engine: with CUDA IPC on the GPU of a rank, else anywhere."""
    if config.weights.transport != "ipc":
        return {}
    here = PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=rank)
    return {"num_gpus": SHARED_GPU, "scheduling_strategy": here}


def missing_resources(config: Config, gpus: int) -> str:
    """Resources that the ranks and engines need and the cluster does not have, in words; empty if it has enough."""
    has = ray.cluster_resources()
    needs = {name: amount * config.trainer.ranks for name, amount in rank_bundle(config, gpus).items()}
    needs["CPU"] += config.generator.engines * cpus_each(gpus)
    if gpus and config.weights.transport != "ipc":
        needs["GPU"] += gpus * config.generator.tensor_parallel_size * config.generator.engines
    short = {name: amount for name, amount in needs.items() if has.get(name, 0) < amount}
    return ", ".join(f"{amount:g} {name} (it has {has.get(name, 0):g})" for name, amount in short.items())
