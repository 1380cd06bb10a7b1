"""Weights to several hosts over slow links: seconds until all have them, against one host, and bytes sent by the ranks.

    python -m benchmarks.weights_hosts [--millions 50] [--mbit 100] [--ranks 1]

Hosts are namespaces on this machine (Linux and root, see tests/hosts). Ranks, each on its own host, and the hosts'
images work as in a run, without models and engines. `ray`: hosts fetch buckets of the ranks' parts as Ray objects.
`nixl`, where it is installed: hosts read from the ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.deaths import WATCHING
from actors.trainer.actor import SENDING, TrainerRank
from actors.trainer.group import TrainerGroup
from actors.weights import nixl_reads
from actors.weights.image import ImageHolder
from actors.weights.node_images import MAX_FAILURES, NodeImages
from service.config import load_config
from service.learn.model.sharding import WeightRows, shard_bounds
from service.types import PolicyVersion
from tests.hosts.bed import Bed, Host

HOSTS = 3
TENSORS = 50


class Rank(TrainerRank):
    """A rank with tensors in place of a model."""

    def fill(self, millions: float) -> None:
        """Create this rank's rows of weights with `millions` million elements in total."""
        nixl_reads.RDMA_CARDS = Path("/sys")  # NIXL takes TCP
        torch.manual_seed(self._rank)
        shape = (int(millions * 1e6 / TENSORS / 1000), 1000)
        first, end = shard_bounds(shape[0], self._rank, self._world_size)
        made = {f"layers.{number}.weight": torch.randn(end - first, 1000).bfloat16() for number in range(TENSORS)}
        rows = {name: WeightRows(shape, first, tensor) for name, tensor in made.items()}
        policy = SimpleNamespace(dtype=torch.bfloat16)
        self._learner = SimpleNamespace(shards=lambda: rows, policy=policy)  # type: ignore[assignment]


class Holder(ImageHolder):
    """The generator of a host, without an engine."""

    def __init__(self) -> None:
        super().__init__()
        nixl_reads.RDMA_CARDS = Path("/sys")


class World:
    """The actors: each rank on its own host, and a generator on each of the other hosts."""

    def __init__(self, millions: float, n_ranks: int) -> None:
        config = load_config([], [f"trainer.ranks={n_ranks}"])
        here = ray.get_runtime_context().get_node_id()
        nodes = [here, *(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)]
        at = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        actor = ray.remote(concurrency_groups={SENDING: 1, WATCHING: 1})(Rank)
        self.ranks: list[Any] = [
            actor.options(num_cpus=0, scheduling_strategy=at[rank]).remote(config.model_dump_json(), rank)
            for rank in range(n_ranks)
        ]
        ray.get([rank.fill.remote(millions) for rank in self.ranks])
        self.holders: dict[str, Any] = {
            f"generator-{number}": ray.remote(Holder).options(num_cpus=0, scheduling_strategy=at[number]).remote()
            for number in range(n_ranks, n_ranks + HOSTS)
        }
        ray.get([holder.hold_image.remote(-1, 0) for holder in self.holders.values()])
        self.trainer = TrainerGroup(config, self.ranks)
        self.trainer.nodes = nodes[:n_ranks]
        self.files = NodeImages(self.holders, self.trainer, config.weights.sync_deadline)
        for number, name in enumerate(self.holders, start=n_ranks):
            self.files.register(name, nodes[number])
        self._step = 0

    async def publish(self, hosts: int, failures: int) -> float:
        """Publish the next version to `hosts` hosts; returns the seconds until all have it. `failures`: number of
        earlier failures of NIXL, after `MAX_FAILURES` of which it is not used."""
        self.files._failures = failures
        self._step += 1
        version, names = PolicyVersion(1, self._step), list(self.holders)[:hosts]
        weights = await self.trainer.weights(version)
        start = time.monotonic()

        async def taken(name: str) -> None:
            if await self.files.sources_for(name, weights) is None:
                raise ValueError(f"{name} has no weights")

        self.files.begin(names, weights)
        await asyncio.gather(*map(taken, names))
        seconds = time.monotonic() - start
        if self.files._failures != failures:
            raise ValueError(f"the hosts could not read with NIXL: {self.files._said}")
        return seconds

    def end(self) -> None:
        """End the actors."""
        for actor in (*self.ranks, *self.holders.values()):
            ray.kill(actor)


async def measure(millions: float, n_ranks: int) -> None:
    """Measure inside the first host; prints each figure as soon as it is known."""
    world = World(millions, n_ranks)
    ways = {"ray": MAX_FAILURES} | ({"nixl": 0} if importlib.util.find_spec("nixl") is not None else {})
    for way, failures in ways.items():
        one, all_hosts = await world.publish(1, failures), await world.publish(HOSTS, failures)
        print(f"{way}: 1 host {one:.1f} s, {HOSTS} hosts {all_hosts:.1f} s, ratio {all_hosts / one:.2f}", flush=True)
    world.end()


def main() -> None:
    """Make the hosts, and measure inside the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=50.0)
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        ray.init(log_to_driver=False)
        asyncio.run(measure(arguments.millions, arguments.ranks))
        return
    with (
        tempfile.TemporaryDirectory() as shared,
        Bed(Path(shared), [Host(f"host-{n}") for n in range(HOSTS + arguments.ranks)]) as bed,
    ):
        bed.start_ray()
        for name in bed.hosts:
            bed.limit(name, arguments.mbit)
        sizes = ["--millions", str(arguments.millions), "--ranks", str(arguments.ranks)]
        command = [sys.executable, "-m", "benchmarks.weights_hosts", "--inside", *sizes]
        sys.exit(bed.popen(bed.head, command, RAY_ADDRESS=bed.address).wait())


if __name__ == "__main__":
    main()
