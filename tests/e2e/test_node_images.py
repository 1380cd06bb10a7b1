"""New weights reach a node once, from the ranks; all engines of the node map one image."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from actors.weights.image import ImageHolder
from actors.weights.nixl_reads import RemoteMemory
from actors.weights.node_images import NodeImages
from actors.weights.part import PublishedWeights, WeightBucket
from actors.weights.part_buffers import PartBuffers
from actors.weights.pulled import WeightFile
from service.types import PolicyVersion
from tests.pure.actors.fakes import at, copied, given_by

pytestmark = pytest.mark.slow


class Rank0:
    """Gives out what was published last."""

    nodes = ("of the ranks",)

    def __init__(self) -> None:
        self.given, self.publication = 0, PartBuffers()

    def publishes(self, step: int) -> PublishedWeights:
        weights = {"w": torch.full((512, 1024), float(step))}
        version = PolicyVersion(1, step)
        copied(version.pack(), weights, [self.publication])
        return PublishedWeights(version, sources=(self.publication.source,))

    @property
    def data(self) -> bytes:
        data: bytes = given_by(self.publication)[1].tobytes()
        return data

    async def remotes(self) -> list[tuple[RemoteMemory | None, str]]:
        return [(None, "buckets are tested here")]

    async def bucket(self, version: PolicyVersion, rank: int, start: int, stop: int) -> tuple[WeightBucket, Any]:
        bucket, message = given_by(self.publication, start, stop)
        self.given += len(message)
        return bucket, ray.put(message)


class Holder(ImageHolder):
    """A generator without an engine."""

    async def mapped(self, path: str, version: PolicyVersion, n_bytes: int) -> tuple[str, bytes]:
        """Which file it is, and what is in it."""
        file = WeightFile(version.pack(), at(path, n_bytes))
        return path.partition("#")[2], file.read(0, n_bytes).numpy().tobytes()


@pytest.fixture
def holders(local_ray: None) -> Iterator[dict[str, Any]]:
    """Three generators, of which two share a node."""
    made = {f"generator-{n}": ray.remote(Holder).options(num_cpus=0).remote() for n in range(3)}
    ray.get([holder.__ray_ready__.remote() for holder in made.values()])  # a loaded machine starts them slowly
    yield made
    for holder in made.values():
        ray.kill(holder)


def test_a_node_receives_new_weights_once_and_all_of_its_engines_map_that_image(holders: dict[str, Any]) -> None:
    rank_0 = Rank0()
    files = NodeImages(holders, rank_0, 60.0)  # type: ignore[arg-type]
    for name, node in zip(holders, ("a", "a", "b"), strict=True):
        files.register(name, node)

    async def take(name: str, weights: PublishedWeights) -> tuple[str, bytes]:
        sized = weights.version, len(rank_0.data)
        (source,) = await files.sources_for(name, weights) or ()
        found: tuple[str, bytes] = await holders[name].mapped.remote(source.path, *sized)
        return found

    async def taken_by_all(step: int) -> list[tuple[str, bytes]]:
        weights = rank_0.publishes(step)
        files.begin(list(holders), weights)
        return list(await asyncio.gather(*(take(name, weights) for name in holders)))

    for step in (1, 2):
        first, second, other = asyncio.run(taken_by_all(step))
        assert first == second, "two engines of a node load one image"
        assert first[0] != other[0]
        assert {content for _, content in (first, second, other)} == {rank_0.data}
        assert rank_0.given == step * len(rank_0.data), "rank 0 gave one copy to Ray, for two nodes"
