"""Generators and a trainer without Ray, whose methods are called as an actor's are, and which can be told to fail."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray.exceptions
from torch import Tensor

from actors.weights.memory import PAGE, WeightMemory
from actors.weights.nixl_reads import RemoteMemory
from actors.weights.part import PublishedWeights, Source, WeightBucket, WeightPart
from actors.weights.part_buffers import PartBuffers
from actors.weights.policy_tensors import WeightBytes, checksum_of
from service.learn.model.sharding import WeightRows, shard_bounds
from service.run.liveness.supervisor import Life
from service.types import PolicyVersion


def published(step: int, *parts: Source) -> PublishedWeights:
    """Weights of a step; if no parts are given, a file that is one bucket of one rank."""
    return PublishedWeights(PolicyVersion(1, step), parts or (Source(WeightPart(((0, 16),)), "/rank-0"),))


def on_ranks(weights: Mapping[str, Tensor], n_ranks: int = 1) -> list[dict[str, WeightRows]]:
    """What each rank has of these weights, as FSDP cuts them."""
    return [
        {
            name: WeightRows(tuple(tensor.shape), start, tensor[start:stop])
            for name, tensor in weights.items()
            for start, stop in [shard_bounds(len(tensor), rank, n_ranks)]
        }
        for rank in range(n_ranks)
    ]


def copied(version: int, weights: Mapping[str, Tensor], ranks: int | list[PartBuffers]) -> list[PartBuffers]:
    """The ranks after a publication; if a number is given, as many new ones."""
    ranks = [PartBuffers(rank) for rank in range(ranks)] if isinstance(ranks, int) else ranks
    for buffers, rows in zip(ranks, on_ranks(weights, len(ranks)), strict=True):
        buffers.copy(version, rows, next(iter(weights.values())).dtype)
    return ranks


def bucket_of(data: WeightBytes, start: int = 0) -> WeightBucket:
    """These bytes as a bucket, from this byte of the file on."""
    return WeightBucket(((start, len(data)),), checksum_of(data))


def given_by(copy: PartBuffers, start: int = 0, stop: int | None = None) -> tuple[WeightBucket, Any]:
    """A bucket of the newest version; without numbers, all of the part."""
    assert copy.version is not None
    found = copy.bucket(copy.version, start, copy.part.n_bytes if stop is None else stop)
    assert found is not None
    return found


def image_of(data: bytes, version: int = 0) -> WeightMemory:
    """The memory of a node's image of this file."""
    memory = WeightMemory(len(data))
    memory.octets().numpy()[:] = np.frombuffer(data, np.uint8)
    memory.mark(version)
    return memory


def at(path: str, n_bytes: int) -> list[Source]:
    """Where an engine reads the whole file that is in an image."""
    return [Source(WeightPart(((0, n_bytes),)), path)]


def content(memory: WeightMemory) -> bytes:
    """What other processes find in an image."""
    return file_at(memory.path).read_bytes()[PAGE : PAGE + memory.n_bytes]


def file_at(path: str) -> Path:
    """The file of an image at this path."""
    return Path(path.partition("#")[0])


class Method:
    """A coroutine function that has `remote`, too, as an actor's method has it."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        return asyncio.ensure_future(self._function(*arguments))

    def __call__(self, *arguments: Any) -> Coroutine[Any, Any, Any]:
        return self._function(*arguments)


def answering(answer: Any = None) -> Method:
    """Gives the same answer to every call; of a list, one element a call; an error is raised, a future waited for."""

    async def answers(*_: Any) -> Any:
        given = answer.pop(0) if isinstance(answer, list) else answer
        if isinstance(given, BaseException):
            raise given
        return await given if isinstance(given, asyncio.Future) else given

    return Method(answers)


async def until(come: Callable[[], object]) -> None:
    """Let the others run until that has come."""
    async with asyncio.timeout(60):
        while not come():
            await asyncio.sleep(0)


def opened() -> asyncio.Event:
    """An event that holds nobody up."""
    event = asyncio.Event()
    event.set()
    return event


def died() -> BaseException:
    return ray.exceptions.RayActorError()


class FakeRank0:
    """The trainer, which gives out weights of one bucket a rank until it has newer ones than those of `newest`."""

    nodes: tuple[str, ...] = ("node of rank 0",)

    def __init__(self, *, nixl: bool = False) -> None:
        self.newest = PolicyVersion(1, 1)
        self.buckets = 0
        """Number of buckets that were asked for."""
        self.remote: tuple[RemoteMemory | None, str] = None, "NIXL cannot be imported"
        if nixl:
            self.remote = RemoteMemory(b"rank", 0), ""

    async def remotes(self) -> list[tuple[RemoteMemory | None, str]]:
        return [self.remote for _ in self.nodes]

    async def bucket(self, version: PolicyVersion, rank: int, start: int, stop: int) -> tuple[WeightBucket, Any] | None:
        self.buckets += 1
        if version < self.newest:
            return None
        data = np.full(stop - start, version.step, np.uint8)
        return bucket_of(data, rank * len(data) + start), data


class FakeGenerator:
    """Writes down what it was asked; what `failing` names raises that, once. Each of its methods is an actor's."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said
        self.failing: dict[str, BaseException] = {}
        self.paths: list[str] = []
        """Of the images that it began."""
        self.gate, self.reading, self.loading = opened(), opened(), opened()
        """Closed, an image is being written, a read with NIXL hangs, an update is being made."""
        self.unread: list[str] = []
        """Why the next reads with NIXL fail; empty: they do not."""
        self.read_from: list[str] = []
        """From where each image was read."""
        self.blocking: asyncio.Queue[str | BaseException] = asyncio.Queue()
        """What blocks its event loop, or what the question raises."""
        self.places_known: list[int] = []
        """How many places each question knew."""
        self._version = 0

    def __getattr__(self, method: str) -> Method:
        if method.startswith("_"):
            raise AttributeError(method)
        return Method(getattr(self, f"_{method}"))

    async def _hold_image(self, version: int, n_bytes: int) -> str:
        if self._version != version:
            self._version = version
            self.paths.append(f"/{self.name}/{len(self.paths) + 1}")
        return self.paths[-1]

    async def _read_image(self, version: int, sources: Any, remotes: Any, within: float) -> tuple[str | None, str]:
        await self.gate.wait()
        await self.reading.wait()
        self._fail("hold")
        if self.unread:
            return None, self.unread.pop(0)
        self.read_from.append(remotes[0].agent.decode())
        return await self._hold_image(version, 0), ""

    async def _write_image(self, version: int, bucket: WeightBucket, message: Any) -> None:
        await self.gate.wait()
        self._fail("hold")

    async def _update_weights(self, version: int, data: Any, checksum: int) -> None:
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
