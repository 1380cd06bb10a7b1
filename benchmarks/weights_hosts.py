"""Weights to several hosts over slow links: seconds until all have them, against one host.

    python -m benchmarks.weights_hosts [--millions 50]

Hosts are namespaces on this machine (Linux and root, see tests/hosts). The rank, on its own host, and the hosts' images
work as in a run, without models and engines. `ray`: hosts fetch buckets of the rank's part as Ray objects. `nixl`,
where it is installed: hosts read from the rank.
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
from service.learn.model.sharding import WeightRows
from service.types import PolicyVersion
from tests.hosts.bed import Bed, Host

HOSTS, MBIT = 3, 100
TENSORS = 50


class Rank(TrainerRank):
    """A rank with tensors in place of a model."""

    def fill(self, millions: float) -> None:
        """Create weights with `millions` million elements in total."""
        nixl_reads.RDMA_CARDS = Path("/sys")  # NIXL takes TCP
        shape = (int(millions * 1e6 / TENSORS / 1000), 1000)
        made = {f"layers.{number}.weight": torch.randn(shape).bfloat16() for number in range(TENSORS)}
        rows = {name: WeightRows(shape, 0, tensor) for name, tensor in made.items()}
        policy = SimpleNamespace(dtype=torch.bfloat16, shards=lambda: rows)
        self._learner = SimpleNamespace(policy=policy)  # type: ignore[assignment]


class Holder(ImageHolder):
    """The generator of a host, without an engine."""

    def __init__(self) -> None:
        super().__init__()
        nixl_reads.RDMA_CARDS = Path("/sys")


class World:
    """The actors: the rank on its own host, and a generator on each of the other hosts."""

    def __init__(self, millions: float) -> None:
        config = load_config([], ["trainer.ranks=1"])
        here = ray.get_runtime_context().get_node_id()
        nodes = [here, *(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)]
        at = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        actor = ray.remote(concurrency_groups={SENDING: 1, WATCHING: 1})(Rank)
        self.rank = actor.options(num_cpus=0, scheduling_strategy=at[0]).remote(config.model_dump_json(), 0)
        ray.get(self.rank.fill.remote(millions))
        self.holders: dict[str, Any] = {
            f"generator-{number}": ray.remote(Holder).options(num_cpus=0, scheduling_strategy=at[number]).remote()
            for number in range(1, 1 + HOSTS)
        }
        ray.get([holder.hold_image.remote(-1, 0) for holder in self.holders.values()])
        self.trainer = TrainerGroup(config, [self.rank])
        self.trainer.nodes = nodes[:1]
        self.files = NodeImages(self.holders, self.trainer, config.weights.sync_deadline)
        for number, name in enumerate(self.holders, start=1):
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
        for actor in (self.rank, *self.holders.values()):
            ray.kill(actor)


async def measure(millions: float) -> None:
    """Measure inside the first host; prints each figure as soon as it is known."""
    world = World(millions)
    ways = {"ray": MAX_FAILURES} | ({"nixl": 0} if importlib.util.find_spec("nixl") is not None else {})
    for way, failures in ways.items():
        one, all_hosts = await world.publish(1, failures), await world.publish(HOSTS, failures)
        print(f"{way}: 1 host {one:.1f} s, {HOSTS} hosts {all_hosts:.1f} s, ratio {all_hosts / one:.2f}", flush=True)
    world.end()


def main() -> None:
    """Make the hosts, and measure inside the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=50.0)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        ray.init(log_to_driver=False)
        asyncio.run(measure(arguments.millions))
        return
    with (
        tempfile.TemporaryDirectory() as shared,
        Bed(Path(shared), [Host(f"host-{n}") for n in range(HOSTS + 1)]) as bed,
    ):
        bed.start_ray()
        for name in bed.hosts:
            bed.limit(name, MBIT)
        command = [sys.executable, "-m", "benchmarks.weights_hosts", "--inside", "--millions", str(arguments.millions)]
        sys.exit(bed.popen(bed.head, command, RAY_ADDRESS=bed.address).wait())


if __name__ == "__main__":
    main()
