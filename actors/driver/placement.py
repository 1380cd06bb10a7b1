"""Reserves room for the trainer's ranks and the engines: one placement group, all of it or nothing.

A bundle is the room of one rank or of one engine, whose GPUs are on one node. Two ranks and an engine of two GPUs:

    bundles   {CPU 1, GPU 1}  {CPU 1, GPU 1}  {CPU 1, GPU 2}
    index      rank 0          rank 1          generator-0

Actors keep their bundle when they restart.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.generator.engine import engine_env
from service.config import Config
from service.errors import RunFailed, UserError

ACCELERATOR_SHARE = 0.001
"""Amount of the resource `accelerator_type:H100` for a rank; every node with such GPUs has 1."""

SHARED_GPU = 0.5
"""GPUs of a rank, and of an engine, that share one."""

SHARED_KV_CACHE_BYTES = 8 << 30
"""KV cache that is proposed for an engine that shares its GPU with a rank."""

SHARED_UTILIZATION = 0.35
"""`generator.gpu_memory_utilization` that is proposed for such an engine."""

QUIET_SECONDS = 2.0
"""How long a run waits for room before it says what is missing."""

Bundle = dict[str, float]


class Node(NamedTuple):
    """A node of the cluster, with what it has in all."""

    address: str
    resources: Mapping[str, float]


def gpus_each() -> int:
    """GPUs of a trainer rank, and of each tensor-parallel rank of an engine: 1 if the cluster has GPUs, else 0."""
    return 1 if ray.cluster_resources().get("GPU", 0) else 0


def rank_bundle(config: Config, gpus: int) -> Bundle:
    """The room of one rank; with CUDA IPC that of an engine too, which shares the rank's GPU."""
    bundle = _bundle(gpus)
    if config.weights.transport == "ipc":
        bundle["CPU"] *= 2
    if config.trainer.accelerator is not None:
        bundle[f"accelerator_type:{config.trainer.accelerator}"] = ACCELERATOR_SHARE
    return bundle


def engine_bundle(config: Config, gpus: int) -> Bundle:
    """The room of one engine."""
    return _bundle(gpus * config.generator.tensor_parallel_size)


def _bundle(gpus: int) -> Bundle:
    # half a CPU without GPUs, so that a small run fits on two cores
    return {"CPU": 1.0, "GPU": float(gpus)} if gpus else {"CPU": 0.5}


def run_bundles(config: Config, gpus: int) -> list[Bundle]:
    """The room of a run: all ranks, then all engines that have a room of their own."""
    engines = 0 if config.weights.transport == "ipc" else config.generator.min_engines
    return [rank_bundle(config, gpus)] * config.trainer.ranks + [engine_bundle(config, gpus)] * engines


async def reserve(bundles: Sequence[Bundle], within: float, say: Callable[[str], None]) -> PlacementGroup:
    """A placement group with these bundles, on as few nodes as possible; waits until the cluster has room for it.

    A stop signal ends the wait: no thread is in Ray for longer than `QUIET_SECONDS`.

    Raises:
        RunFailed: there was no room for `within` seconds.
    """
    room = placement_group(list(bundles), strategy="PACK")
    deadline = time.monotonic() + within
    said = ""
    try:
        if await asyncio.to_thread(room.wait, min(QUIET_SECONDS, within)):
            return room
        while (left := deadline - time.monotonic()) > 0:
            if (missing := missing_room(bundles, nodes())) != said:
                say(f"WAITING for room in the Ray cluster: {missing}")
                said = missing
            if await asyncio.to_thread(room.wait, min(QUIET_SECONDS, left)):
                return room
    except asyncio.CancelledError:
        remove_placement_group(room)
        raise
    raise RunFailed(f"no room in the Ray cluster for {within:g} s: {missing_room(bundles, nodes())}")


def nodes() -> list[Node]:
    """The nodes of the cluster."""
    return [Node(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]


def missing_room(bundles: Iterable[Bundle], nodes: Sequence[Node]) -> str:
    """The bundles that find no place on these nodes, in words, with what every node has."""
    free = [Counter(node.resources) for node in nodes]
    homeless: Counter[str] = Counter()
    for bundle in sorted(bundles, key=lambda bundle: -bundle.get("GPU", 0)):
        home = next((node for node in free if all(node[name] >= n for name, n in bundle.items())), None)
        if home is None:
            homeless[_in_words(bundle)] += 1
        else:
            home.subtract(bundle)
    needed = "; ".join(f"{number} x ({words})" for words, number in homeless.items())
    has = "; ".join(f"{node.address} has {_in_words(node.resources) or 'none of it'}" for node in nodes)
    if not homeless:
        return f"other work of the cluster holds what this run needs ({has})"
    return f"no node has room for {needed}, each on one node ({has})"


def refuse_too_few_gpus(config: Config, gpus: int) -> None:
    """Refuse a run whose ranks, engines and retrieval server need more GPUs than this machine has.

    Raises:
        UserError: with settings that would fit.
    """
    generator, ranks = config.generator, config.trainer.ranks
    each = generator.tensor_parallel_size
    engines = 0 if config.weights.transport == "ipc" else generator.min_engines
    searching = 0 if config.env.retrieval is None else math.ceil(config.env.retrieval.gpus)
    scorers = [scorer for scorer in config.scorers.values() for _ in range(scorer.workers if scorer.use else 1)]
    searching += sum(math.ceil(scorer.gpus) for scorer in scorers)
    if (needed := ranks + engines * each + searching) <= gpus:
        return
    left = gpus - searching if gpus > searching else gpus
    fewer_engines = max(1, left // (2 * each))
    if left > each:
        fits = f"trainer.ranks={left - fewer_engines * each} generator.engines={fewer_engines}"
    else:
        fits = (
            f"trainer.ranks={left} generator.engines={left} generator.tensor_parallel_size=1 weights.transport=ipc "
            f"generator.kv_cache_bytes={generator.kv_cache_bytes or SHARED_KV_CACHE_BYTES} "
            f"generator.gpu_memory_utilization={SHARED_UTILIZATION}"
        )
    if left == gpus and searching:
        fits += " env.retrieval.gpus=0"
    server = f", env.retrieval.gpus {searching}" if searching else ""
    raise UserError(
        f"{needed} GPUs are needed (trainer.ranks {ranks}, generator.engines {engines} of {each}{server}), this "
        f"machine has {gpus}; that many are used with: {fits}"
    )


def _in_words(resources: Mapping[str, float]) -> str:
    """`2 GPU, 1 CPU`: without memory and the names of nodes."""
    named = {name: n for name, n in resources.items() if name in ("GPU", "CPU") or name.startswith("accelerator_type:")}
    return ", ".join(f"{n:g} {name}" for name, n in sorted(named.items(), reverse=True))


def rank_options(config: Config, gpus: int, room: PlacementGroup, rank: int) -> dict[str, Any]:
    """Actor options of one rank."""
    shares = config.weights.transport == "ipc"
    bundle = rank_bundle(config, gpus)
    # micro-batches differ in length, which leaves holes between fixed segments; CUDA IPC shares fixed segments only
    env_vars = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if gpus and not shares else {}
    return {
        "name": f"trainer-{rank}",
        "num_cpus": _bundle(gpus)["CPU"],
        "num_gpus": SHARED_GPU if gpus and shares else gpus,
        "resources": {name: n for name, n in bundle.items() if name.startswith("accelerator_type:")},
        "max_restarts": -1,
        "runtime_env": {"env_vars": env_vars},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=rank),
    }


def engine_options(config: Config, gpus: int, room: PlacementGroup, bundle: int) -> dict[str, Any]:
    """Actor options of an actor that holds an engine, in this bundle of its own or of a rank."""
    shares = config.weights.transport == "ipc"
    return {
        "num_cpus": _bundle(gpus)["CPU"],
        "num_gpus": SHARED_GPU if gpus and shares else gpus * config.generator.tensor_parallel_size,
        "max_concurrency": 1000,
        "runtime_env": {"env_vars": engine_env(config)},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=bundle),
    }


def engine_index(config: Config, engine: int) -> int:
    """The index of an engine's bundle among those of its run: its own, or with CUDA IPC that of a rank."""
    return engine if config.weights.transport == "ipc" else config.trainer.ranks + engine
