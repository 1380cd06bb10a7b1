"""New weights reach a node once: one generator writes the file, all of its engines map it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import save

from actors.weights.checksum import PolicySize, PublishedWeights, checksum_of
from actors.weights.node_files import NodeFiles
from actors.weights.shared_memory_file import open_shared_memory_file, write_shared_memory_file
from service.errors import WeightsGone

pytestmark = pytest.mark.slow

SECONDS = 60.0


class Holder:
    """A generator without an engine: what it does with the files of weights is what a generator does."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.written = 0

    async def hold_weights(self, data: Any, checksum: int) -> str:
        fd = write_shared_memory_file(data, checksum, PolicySize(6, tied=False))
        self.written += 1
        path = f"/proc/{os.getpid()}/fd/{fd}"
        self.held[path] = fd
        return path

    async def release_weights(self, path: str) -> None:
        os.close(self.held.pop(path))

    async def mapped(self, path: str) -> tuple[int, bytes]:
        """Which file it is, and what is in it."""
        fd = open_shared_memory_file(path)
        try:
            return os.fstat(fd).st_ino, Path(f"/proc/{os.getpid()}/fd/{fd}").read_bytes()
        finally:
            os.close(fd)

    async def counts(self) -> tuple[int, int]:
        """Files written so far, and files held."""
        return self.written, len(self.held)


def published(value: float) -> tuple[PublishedWeights, bytes]:
    data = save({"w": torch.full((2, 3), value)})
    array = np.frombuffer(data, np.uint8)
    return PublishedWeights(ray.put(array), checksum_of(data)), data


@pytest.fixture
def holders(local_ray: None) -> Iterator[dict[str, Any]]:
    """Three generators, of which two share a node."""
    made = {f"generator-{n}": ray.remote(Holder).options(num_cpus=0).remote() for n in range(3)}
    yield made
    for holder in made.values():
        ray.kill(holder)


def on_two_nodes(holders: dict[str, Any]) -> NodeFiles:
    files = NodeFiles(holders, SECONDS)
    for name, node in zip(holders, ("a", "a", "b"), strict=True):
        files.register(name, node)
    return files


def test_a_node_writes_new_weights_once_and_all_of_its_engines_map_that_file(holders: dict[str, Any]) -> None:
    files = on_two_nodes(holders)
    weights, data = published(1.0)

    async def take(name: str) -> tuple[int, bytes]:
        async with files.path_for(name, weights) as path:
            found: tuple[int, bytes] = await holders[name].mapped.remote(path)
            return found

    async def taken_by_all() -> list[tuple[int, bytes]]:
        return list(await asyncio.gather(*(take(name) for name in holders)))

    for update in (1, 2):
        first, second, other = asyncio.run(taken_by_all())
        assert first == second, "two engines of a node load one file"
        assert first[0] != other[0]
        assert {content for _, content in (first, second, other)} == {data}
        counts = ray.get([holder.counts.remote() for holder in holders.values()])
        assert counts == [(update, 0), (0, 0), (update, 0)], "each node's first generator wrote, and gave it back"
        weights, data = published(2.0)


def test_where_the_holder_dies_another_generator_of_the_node_writes_the_file_anew(holders: dict[str, Any]) -> None:
    files = on_two_nodes(holders)
    weights, data = published(3.0)

    async def killed_between() -> tuple[int, bytes]:
        async with files.path_for("generator-0", weights) as path, files.path_for("generator-1", weights) as same:
            assert same == path
            ray.kill(holders["generator-0"])
            with suppress(ray.exceptions.RayActorError):
                await holders["generator-0"].counts.remote()
            with pytest.raises(ray.exceptions.RayTaskError) as gone:
                await holders["generator-1"].mapped.remote(path)
            assert isinstance(gone.value.cause, WeightsGone)
            files.forget("generator-1")
            async with files.path_for("generator-1", weights) as another:
                found: tuple[int, bytes] = await holders["generator-1"].mapped.remote(another)
                return found

    assert asyncio.run(killed_between())[1] == data
    assert ray.get(holders["generator-1"].counts.remote()) == (1, 0)


def test_who_has_the_file_open_keeps_it_when_its_writer_ends() -> None:
    _, data = published(4.0)
    fd = write_shared_memory_file(data, checksum_of(data), PolicySize(6, tied=False))
    path = f"/proc/{os.getpid()}/fd/{fd}"
    own = open_shared_memory_file(path)
    os.close(fd)
    with pytest.raises(WeightsGone, match="are gone"):
        open_shared_memory_file(path)
    assert os.pread(own, len(data), 0) == data
    os.close(own)
