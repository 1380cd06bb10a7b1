"""Generators and a trainer without Ray, whose methods are called as an actor's are, and which can be told to fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray.exceptions
from torch import Tensor

from actors.weights.image import Image
from actors.weights.memory import PAGE
from actors.weights.nixl_reads import RemoteMemory
from actors.weights.node_images import NodeImages
from actors.weights.part import Source, WeightBucket, WeightPart
from actors.weights.part_buffers import PartBuffers
from actors.weights.policy_tensors import WeightBytes, checksum_of
from actors.weights.weight_source import PublishedWeights
from service.learn.model.sharding import WeightRows, shard_bounds
from service.run.liveness.supervisor import Life
from service.types import PolicyVersion

ONE_BUCKET = (Source(WeightPart(((0, 16),)), "/rank-0"),)
"""A file of weights that is one bucket of one rank."""


def all_rows(weights: Mapping[str, Tensor]) -> dict[str, WeightRows]:
    """These weights as the only rank has them."""
    return {name: WeightRows(tuple(tensor.shape), 0, tensor) for name, tensor in weights.items()}


def on_ranks(weights: Mapping[str, Tensor], n_ranks: int) -> list[dict[str, WeightRows]]:
    """What each rank has of these weights, as FSDP cuts them."""
    return [
        {
            name: WeightRows(tuple(tensor.shape), start, tensor[start:stop])
            for name, tensor in weights.items()
            for start, stop in [shard_bounds(len(tensor), rank, n_ranks)]
        }
        for rank in range(n_ranks)
    ]


class Method:
    """Something with `remote`, as an actor's method has it."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        return asyncio.ensure_future(self._function(*arguments))


class FakeRank0:
    """The trainer, which gives out weights of one bucket a rank until it has newer ones than those of `newest`."""

    nodes: tuple[str, ...] = ("node of rank 0",)

    def __init__(self) -> None:
        self.newest = PolicyVersion(1, 1)
        self.buckets = 0
        """Number of buckets that were asked for."""
        self.remote: tuple[RemoteMemory | None, str] = None, "NIXL cannot be imported"

    async def remotes(self) -> list[tuple[RemoteMemory | None, str]]:
        return [self.remote for _ in self.nodes]

    async def bucket(self, version: PolicyVersion, rank: int, start: int, stop: int) -> tuple[WeightBucket, Any] | None:
        self.buckets += 1
        if version < self.newest:
            return None
        data = np.full(stop - start, version.step, np.uint8)
        return bucket_of(data, rank * len(data) + start), data


def bucket_of(data: WeightBytes, start: int = 0) -> WeightBucket:
    """These bytes as a bucket, from this byte of the file on."""
    return WeightBucket(((start, len(data)),), checksum_of(data))


def given_by(copy: PartBuffers, start: int, stop: int) -> tuple[WeightBucket, Any]:
    """A bucket of the newest version."""
    assert copy.version is not None
    found = copy.bucket(copy.version, start, stop)
    assert found is not None
    return found


def image_of(data: bytes, version: int = 0) -> Image:
    """A node's image of this file."""
    image = Image(version, len(data))
    image.write(bucket_of(data), data)
    return image


def at(path: str, n_bytes: int) -> list[Source]:
    """Where an engine reads the whole file that is in an image."""
    return [Source(WeightPart(((0, n_bytes),)), path)]


@asynccontextmanager
async def path_for(files: NodeImages, name: str, weights: PublishedWeights) -> AsyncIterator[str | None]:
    """The path from which a generator on another host than the ranks loads while the block runs."""
    async with files.sources_for(name, weights) as sources:
        yield None if sources is None else sources[0].path


def content(image: Image) -> bytes:
    """What is in an image."""
    return file_at(image.path).read_bytes()[PAGE : PAGE + len(image._octets)]


def file_at(path: str) -> Path:
    """The file of an image at this path."""
    return Path(path.partition("#")[0])


class FakeGenerator:
    """Writes down what it was asked; what `failing` names raises that, once."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name = name
        self.said = said
        self.failing: dict[str, BaseException] = {}
        self.written = 0
        self._images: dict[int, str] = {}
        self.gate = asyncio.Event()
        """Closed, an image is being written."""
        self.gate.set()
        self.reading = asyncio.Event()
        """Closed, a reading with NIXL hangs."""
        self.reading.set()
        self.loading = asyncio.Event()
        """Closed, an update is being made."""
        self.loading.set()
        self.hold_image = Method(self._hold)
        self.read_image = Method(self._read)
        self.unread: list[str] = []
        """Why the next readings with NIXL fail; empty: they do not."""
        self.read_from: list[str] = []
        """From where each image was read."""
        self.write_image = Method(self._write)
        self.release_image = Method(self._release)
        self.update_weights = Method(self._update)
        self.life = Method(self._life)
        self.blocking: asyncio.Queue[str | BaseException] = asyncio.Queue()
        """What blocks its event loop, or what the question raises."""
        self.places_known: list[int] = []
        """How many places each question knew."""
        self.blocked = Method(self._blocked)

    @property
    def paths(self) -> set[str]:
        """Of the images that it holds."""
        return {*self._images.values()}

    def dies(self) -> None:
        """Its images go with it."""
        self._images.clear()

    async def _hold(self, number: int, version: int, n_bytes: int) -> str:
        if number not in self._images:
            self.written += 1
            self._images[number] = f"/{self.name}/{self.written}"
        return self._images[number]

    async def _read(
        self, number: int, version: int, sources: Any, remotes: Any, within: float
    ) -> tuple[str | None, str]:
        await self.gate.wait()
        await self.reading.wait()
        self._fail("hold")
        if self.unread:
            return None, self.unread.pop(0)
        self.read_from.append(remotes[0].agent.decode())
        return await self._hold(number, 0, 0), ""

    async def _write(self, number: int, bucket: WeightBucket, message: Any) -> None:
        await self.gate.wait()
        self._fail("hold")

    async def _release(self, number: int) -> None:
        self._fail("release")
        self._images.pop(number, None)

    async def _update(self, version: int, data: Any, checksum: int) -> None:
        await self.loading.wait()
        self._fail("update")
        where = data.decode() if isinstance(data, bytes) else data[0].path
        self.said.append(f"{self.name} takes {PolicyVersion.unpack(version)} from {where}, checksum {checksum}")

    async def _life(self) -> Life:
        return Life(self.name, is_set_up=True)

    async def _blocked(self, known: int) -> str:
        self.places_known.append(known)
        if isinstance(place := await self.blocking.get(), BaseException):
            raise place
        return place

    def _fail(self, what: str) -> None:
        if what in self.failing:
            raise self.failing.pop(what)


def died() -> BaseException:
    return ray.exceptions.RayActorError()
