"""New weights reach a node once, from rank 0 or the node before; all engines of the node map one image."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.weights.delta import WeightBucket
from actors.weights.image import Image, ImageHolder, open_image
from actors.weights.node_images import NodeImages
from actors.weights.part import PartCopy, WeightPart
from actors.weights.policy_tensors import PolicySize
from actors.weights.weight_source import PublishedWeights
from service.config import WeightsConfig
from service.errors import WeightsGone
from service.types import PolicyVersion
from tests.pure.actors.fakes import all_rows, file_at
from tests.waiting import until

pytestmark = pytest.mark.slow

SIZE = PolicySize(512 * 1024, tied=False)


class Rank0:
    """Gives out what was published last."""

    nodes = ("a",)

    def __init__(self) -> None:
        self.given = 0

    def publishes(self, step: int) -> PublishedWeights:
        weights = {"w": torch.full((512, 1024), float(step))}
        self.publication = PartCopy(PolicyVersion(1, step).pack(), all_rows(weights))
        return PublishedWeights(None, 0, (self.publication.part,))

    @property
    def data(self) -> bytes:
        return self.publication.bucket(0, self.publication.part.n_bytes, whole=True)[1].tobytes()

    async def bucket(
        self, version: PolicyVersion, rank: int, start: int, stop: int, whole: bool
    ) -> tuple[WeightBucket, Any]:
        bucket, message = self.publication.bucket(start, stop, whole)
        self.given += len(message)
        return bucket, ray.put(message)


class Holder(ImageHolder):
    """A generator without an engine."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    async def hold_image(self, number: int, parts: Sequence[WeightPart]) -> str:
        self.written += number not in self._images
        return await super().hold_image(number, parts)

    async def mapped(self, path: str) -> tuple[int, bytes]:
        """Which file it is, and what is in it."""
        fd = open_image(path, SIZE)
        try:
            return os.fstat(fd).st_ino, Path(f"/proc/{os.getpid()}/fd/{fd}").read_bytes()
        finally:
            os.close(fd)

    async def counts(self) -> tuple[int, int]:
        """Images held so far, and held now."""
        return self.written, len(self._images)


@pytest.fixture
def holders(local_ray: None) -> Iterator[dict[str, Any]]:
    """Three generators, of which two share a node."""
    made = {f"generator-{n}": ray.remote(Holder).options(num_cpus=0).remote() for n in range(3)}
    ray.get([holder.counts.remote() for holder in made.values()])  # a loaded machine starts them slowly
    yield made
    for holder in made.values():
        ray.kill(holder)


def on_two_nodes(holders: dict[str, Any]) -> tuple[NodeImages, Rank0]:
    rank_0 = Rank0()
    files = NodeImages(WeightsConfig(), holders, rank_0)  # type: ignore[arg-type]
    for name, node in zip(holders, ("a", "a", "b"), strict=True):
        files.register(name, node)
    return files, rank_0


def test_a_node_receives_new_weights_once_and_all_of_its_engines_map_that_image(holders: dict[str, Any]) -> None:
    files, rank_0 = on_two_nodes(holders)

    async def take(name: str, version: PolicyVersion, weights: PublishedWeights) -> tuple[int, bytes]:
        async with files.path_for(name, version, weights) as path:
            found: tuple[int, bytes] = await holders[name].mapped.remote(path)
            return found

    async def taken_by_all(step: int) -> list[tuple[int, bytes]]:
        version, weights = PolicyVersion(1, step), rank_0.publishes(step)
        async with files.spread(list(holders), version, weights):
            return list(await asyncio.gather(*(take(name, version, weights) for name in holders)))

    for step in (1, 2):
        first, second, other = asyncio.run(taken_by_all(step))
        assert first == second, "two engines of a node load one image"
        assert first[0] != other[0]
        assert {content for _, content in (first, second, other)} == {rank_0.data}
        assert rank_0.given == step * len(rank_0.data), "rank 0 gave one copy, for two nodes"
        counts = ray.get([holder.counts.remote() for holder in holders.values()])
        assert counts == [(step, 0), (0, 0), (step, 0)], "each node's first generator wrote, and gave it back"


def test_where_the_holder_dies_another_generator_of_the_node_writes_the_image_anew(holders: dict[str, Any]) -> None:
    files, rank_0 = on_two_nodes(holders)
    of = PolicyVersion(1, 3), rank_0.publishes(3)

    async def killed_between() -> tuple[int, bytes]:
        async with files.path_for("generator-0", *of) as path, files.path_for("generator-1", *of) as same:
            assert same == path
            ray.kill(holders["generator-0"])
            await asyncio.to_thread(until, lambda: not file_at(path).exists())  # Ray ends the process when it likes
            with pytest.raises(ray.exceptions.RayTaskError) as gone:
                await holders["generator-1"].mapped.remote(path)
            assert isinstance(gone.value.cause, WeightsGone)
            files.forget("generator-1")
            async with files.path_for("generator-1", *of) as another:
                found: tuple[int, bytes] = await holders["generator-1"].mapped.remote(another)
                return found

    assert asyncio.run(killed_between())[1] == rank_0.data
    assert ray.get(holders["generator-1"].counts.remote()) == (1, 0)


def test_who_has_the_image_open_keeps_it_when_its_writer_ends() -> None:
    rank_0 = Rank0()
    parts = rank_0.publishes(4).parts
    image, n_bytes = Image(parts), parts[0].n_bytes
    image.write(*rank_0.publication.bucket(0, n_bytes, whole=True))
    own = open_image(image.path, SIZE)
    image.close()
    with pytest.raises(WeightsGone, match="are gone"):
        open_image(image.path, SIZE)
    assert os.pread(own, n_bytes, 0) == rank_0.data
    os.close(own)
