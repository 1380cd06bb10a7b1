"""Reserves resources for the trainer's ranks and the engines, as one placement group (created whole or not at all).
Also places the buffer.

A bundle is the resources of one rank or of one engine; all GPUs of a bundle are on one node. The bundles of a run with
two ranks and an engine of two GPUs:

    bundles   {CPU 1, GPU 1}  {CPU 1, GPU 1}  {CPU 1, GPU 2}
    index      rank 0          rank 1          generator-0

Actors keep their bundle when they restart.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.engine.vllm_arguments import engine_env
from service.config import Config
from service.errors import RunFailed, UserError
from service.observe.summary import duration

ACCELERATOR = "accelerator_type:"
"""Prefix of the names of Ray's resources for accelerators."""
ACCELERATOR_SHARE = 0.001
"""Amount that a rank takes of a resource such as `accelerator_type:H100`; every node with H100 GPUs has an amount
of 1."""
SHARED_GPU = 0.5
"""The fraction of a GPU for a rank, and for the engine that shares the GPU with the rank."""
SHARED_KV_CACHE_BYTES, SHARED_UTILIZATION = 8 << 30, 0.35
"""Values that a message proposes if an engine shares its GPU with a rank: bytes of the KV cache, and
`generator.gpu_memory_utilization`."""
QUIET_SECONDS = 2.0
"""Seconds that a run waits for room before a message says what is missing."""
SAY_SECONDS = 20.0
"""Seconds between two messages while a run waits for room."""

CALLS = 100_000
"""Maximum number of open calls to the buffer. Each waiting claim is an open call, and calls with steps must not wait
for claims to end."""
NODE_ID = "ray.io/node-id"
"""Name of the label in which Ray stores a node's id."""


Node = Mapping[str, Any]
"""A node of the cluster, as `ray.nodes` describes it."""


class Bundle(NamedTuple):
    """The resources that one rank or engine needs, and the labels that its node must have."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = {}


def fits(node: Node, labels: Mapping[str, str]) -> bool:
    """Return True if a node's labels meet conditions in Ray's form: `value`, `!value`, `in(one,other)`,
    `!in(one,other)`."""
    for name, choice in labels.items():
        values = choice.removeprefix("!").removeprefix("in(").removesuffix(")").split(",")
        if (node["Labels"].get(name) in values) == choice.startswith("!"):
            return False
    return True


def gpus_each() -> int:
    """Return the number of GPUs for each trainer rank and each tensor-parallel rank of an engine: 1 if the cluster has
    GPUs, else 0."""
    return 1 if ray.cluster_resources().get("GPU", 0) else 0


def rank_bundle(config: Config, gpus: int) -> Bundle:
    """Return the bundle of one rank. With CUDA IPC, the engine that shares the rank's GPU is in the same bundle."""
    resources = _resources(gpus)
    if config.weights.transport == "ipc":
        resources["CPU"] *= 2
    if config.trainer.accelerator is not None:
        resources[f"{ACCELERATOR}{config.trainer.accelerator}"] = ACCELERATOR_SHARE
    return Bundle(resources, config.placement.trainer)


def engine_bundle(config: Config, gpus: int) -> Bundle:
    """Return the bundle of one engine."""
    return Bundle(_resources(gpus * config.generator.engine_gpus), config.placement.generators)


def _resources(gpus: int) -> dict[str, float]:
    # without GPUs half a CPU: a small run fits on two cores
    return {"CPU": 1.0, "GPU": float(gpus)} if gpus else {"CPU": 0.5}


def run_bundles(config: Config, gpus: int) -> list[Bundle]:
    """Return the bundles of a run: all ranks, then all engines that have a separate bundle."""
    engines = 0 if config.weights.transport == "ipc" else config.generator.min_engines
    return [rank_bundle(config, gpus)] * config.trainer.ranks + [engine_bundle(config, gpus)] * engines


async def reserve(bundles: Sequence[Bundle], within: float, say: Callable[[str], None]) -> PlacementGroup:
    """Create a placement group with these bundles, on as few nodes as possible, when the cluster has room. No call into
    Ray takes longer than `QUIET_SECONDS`, so that a stop signal can end the wait.

    Raises:
        UserError: this machine never has room, and no other node joins it.
        RunFailed: the cluster had no room for `within` seconds.
    """
    if not os.environ.get("RAY_ADDRESS") and not can_fit(bundles, nodes()):
        raise UserError(
            f"{missing_room(bundles, nodes())}, and no other node joins a Ray that Baton starts itself: ask for less "
            "(trainer.ranks, trainer.accelerator, generator.engines, placement), or start Ray with `ray start --head "
            "--labels ...` and set RAY_ADDRESS"
        )
    labels = [dict(bundle.labels) for bundle in bundles]
    room = placement_group(
        [dict(bundle.resources) for bundle in bundles], "PACK", bundle_label_selector=labels if any(labels) else None
    )
    deadline, said, say_again = time.monotonic() + within, "", 0.0
    try:
        while (left := deadline - time.monotonic()) > 0:
            if await asyncio.to_thread(room.wait, min(QUIET_SECONDS, left)):
                return room
            now = time.monotonic()
            if (missing := missing_room(bundles, nodes())) != said or now >= say_again:
                say(f"WAITING for room in the Ray cluster, for {duration(deadline - now)} at most: {missing}")
                said, say_again = missing, now + SAY_SECONDS
    except asyncio.CancelledError:
        remove_placement_group(room)
        raise
    remove_placement_group(room)
    raise RunFailed(f"no room in the Ray cluster for {within:g} s: {missing_room(bundles, nodes())}")


def nodes() -> list[Node]:
    """Return the living nodes of the cluster, with their total resources."""
    return [node for node in ray.nodes() if node["Alive"]]


def can_fit(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> bool:
    """Return False if these nodes could not hold the bundles even if nothing else ran there."""
    for name in {name for bundle in bundles for name in bundle.resources}:
        needed = sum(bundle.resources.get(name, 0) for bundle in bundles)
        if needed > sum(node["Resources"].get(name, 0) for node in nodes):
            return False
    return all(any(fits(node, bundle.labels) for node in nodes) for bundle in bundles)


def missing_room(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> str:
    """Return a text with the resources that a run needs and the resources of each node. (Ray reports only that there is
    no room.)"""
    needed = Counter(_in_words(*bundle) for bundle in bundles)
    asked = {name for bundle in bundles for name in bundle.labels}
    has = []
    for node in nodes:
        labels = {name: value for name, value in node["Labels"].items() if name in asked}
        has.append(f"{node['NodeManagerAddress']} has {_in_words(node['Resources'], labels) or 'none of it'}")
    needs = "; ".join(f"{number} x ({each})" for each, number in needed.items())
    return f"the run needs {needs}, each on one node ({'; '.join(has)})"


def refuse_too_few_gpus(config: Config, gpus: int) -> None:
    """Raises `UserError` if ranks, engines and scorers need more GPUs than this machine has. The message names settings
    that fit, if there are any."""
    generator, trainer, shares = config.generator, config.trainer, config.weights.transport == "ipc"
    each, together = generator.engine_gpus, trainer.sequence_parallel
    engines = 0 if shares else generator.min_engines
    others = sum(math.ceil(each.gpus) * each.n_processes for each in config.scorers.values())
    if (needed := trainer.ranks + engines * each + others) <= gpus:
        return
    left = gpus - others
    fewer_engines = min(max(1, left // (2 * each)), generator.max_engines)
    ranks = (left - fewer_engines * each) // together * together
    fits = f"trainer.ranks={ranks} generator.engines={fewer_engines}"
    if shares or ranks <= 0:
        ranks = left // together * together
        stages = " generator.engine_options.pipeline_parallel_size=1" if each > generator.tensor_parallel_size else ""
        fits = (
            f"trainer.ranks={ranks} generator.engines={min(ranks, generator.max_engines)} "
            f"generator.tensor_parallel_size=1{stages} weights.transport=ipc "
            f"generator.kv_cache_bytes={generator.kv_cache_bytes or SHARED_KV_CACHE_BYTES} "
            f"generator.gpu_memory_utilization={SHARED_UTILIZATION}"
        )
    raise UserError(
        f"{needed} GPUs are needed (trainer.ranks {trainer.ranks}, generator.engines {engines} of {each}, scorers "
        f"{others}), this machine has {gpus}" + (f"; that many are used with: {fits}" if ranks > 0 else "")
    )


def _in_words(resources: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Describe resources, as in `2 GPU, 1 CPU, ray.io/market-type: spot`, without memory and names of nodes."""
    named = {name: n for name, n in resources.items() if name in ("GPU", "CPU") or name.startswith(ACCELERATOR)}
    counted = [f"{n:g} {name}" for name, n in sorted(named.items(), reverse=True)]
    return ", ".join([*counted, *(f"{name}: {value}" for name, value in labels.items())])


def rank_options(config: Config, gpus: int, room: PlacementGroup, rank: int) -> dict[str, Any]:
    """Return the options with which Ray creates the actor of one rank."""
    shares = config.weights.transport == "ipc"
    bundle = rank_bundle(config, gpus)
    # CUDA IPC needs fixed segments; else expandable ones, as micro-batches of different lengths leave holes
    env_vars = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if gpus and not shares else {}
    return {
        "name": f"trainer-{rank}",
        "num_cpus": _resources(gpus)["CPU"],
        "num_gpus": SHARED_GPU if gpus and shares else gpus,
        "resources": {name: n for name, n in bundle.resources.items() if name.startswith(ACCELERATOR)},
        "max_restarts": -1,
        "runtime_env": {"env_vars": env_vars},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=rank),
    }


def engine_options(config: Config, gpus: int, room: PlacementGroup, bundle: int) -> dict[str, Any]:
    """Return the options with which Ray creates an actor with an engine. `bundle`: the index of the engine's bundle,
    or, with CUDA IPC, of the bundle of the rank that shares the GPU."""
    shares = config.weights.transport == "ipc"
    return {
        "num_cpus": _resources(gpus)["CPU"],
        "num_gpus": SHARED_GPU if gpus and shares else gpus * config.generator.engine_gpus,
        "max_concurrency": 1000,
        "runtime_env": {"env_vars": engine_env(config.generator)},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=bundle),
    }


def buffer_options(config: Config) -> dict[str, Any]:
    """Return the options with which Ray creates the buffer's actor. If the driver's node has the required labels, the
    buffer is placed there: losing this node ends the run anyway."""
    labels = dict(config.placement.buffer)
    here = {**labels, NODE_ID: ray.get_runtime_context().get_node_id()}
    return {
        "num_cpus": 0,
        "max_concurrency": CALLS,
        "max_restarts": -1,
        "max_task_retries": -1,
        "label_selector": here,
        "fallback_strategy": [{"label_selector": labels}, {"label_selector": {}}],
    }


def engine_index(config: Config, engine: int) -> int:
    """Return the index of an engine's bundle among all bundles of the run. With CUDA IPC this is the bundle of a
    rank."""
    return engine if config.weights.transport == "ipc" else config.trainer.ranks + engine
