"""A node's image is read from the buffers of the ranks with NIXL: the right bytes of one version, or a reason."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib.util
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from actors.weights import nixl_reads
from actors.weights.image import SPARE, ImageHolder
from actors.weights.nixl_reads import RemoteMemory
from actors.weights.node_images import MAX_FAILURES, NodeImages
from actors.weights.part_buffers import PartBuffers
from actors.weights.weight_source import PublishedWeights
from service.errors import WeightsGone
from service.types import PolicyVersion
from tests.pure.actors.fakes import ONE_BUCKET, FakeGenerator, FakeRank0, content, died, on_ranks, path_for

WITHIN = 20.0
NIXL = "nixl._api"
ROOT = Path(__file__).parents[3]


class NixlError(Exception):
    """One of NIXL's errors."""


NixlError.__module__ = "nixl._bindings"


class FakeAgent:
    """An agent that reads the memory of other agents of this process."""

    all: ClassVar[WeakValueDictionary[str, FakeAgent]] = WeakValueDictionary()
    before_read: Callable[[], None] = staticmethod(lambda: None)
    """Called when a read begins."""
    state = "DONE"
    """The state of every read."""

    def __init__(self, name: str, config: Any) -> None:
        self.name, self.registered, self.known = name, list[tuple[int, int]](), set[str]()
        self.all[name] = self

    def register_memory(self, places: list[tuple[int, int, int, str]], kind: str) -> None:
        self.registered += [(at, n_bytes) for at, n_bytes, _, _ in places]

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        self.known.add(metadata.decode())
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def get_xfer_descs(self, spans: np.ndarray, kind: str) -> list[list[int]]:
        assert spans.shape[1:] == (3,)
        return spans.tolist()

    def initialize_xfer(self, kind: str, here: list[list[int]], there: list[list[int]], name: str) -> Any:
        assert kind == "READ"
        if name not in self.known or (other := self.all.get(name)) is None:
            raise NixlError("NIXL_ERR_REMOTE_DISCONNECT")
        for spans, agent in ((here, self), (there, other)):
            for at, n_bytes, _ in spans:
                assert any(first <= at and at + n_bytes <= first + of for first, of in agent.registered)
        return here, there

    def transfer(self, handle: Any) -> None:
        FakeAgent.before_read()
        if self.state != "PROC":
            for (to, n_bytes, _), (at, _, _) in zip(*handle, strict=True):
                ctypes.memmove(to, at, n_bytes)

    def check_xfer_state(self, handle: Any) -> str:
        return self.state

    def release_xfer_handle(self, handle: Any) -> None:
        pass


@pytest.fixture
def rdma(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with a network card that has RDMA."""
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(nixl_reads, "RDMA_CARDS", tmp_path)
    return tmp_path


@pytest.fixture
def nixl(rdma: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeAgent]]:
    module = SimpleNamespace(nixl_agent=FakeAgent, nixl_agent_config=SimpleNamespace)
    monkeypatch.setitem(sys.modules, NIXL, module)  # type: ignore[arg-type]
    for name in ("before_read", "state"):
        monkeypatch.setattr(FakeAgent, name, getattr(FakeAgent, name))
    FakeAgent.before_read = staticmethod(lambda: None)
    yield FakeAgent


def weights_of(version: int) -> dict[str, Tensor]:
    return {f"layers.{n}.weight": torch.full((3 + n, 5), float(10 * version + n)).bfloat16() for n in range(4)}


class Ranks:
    """The ranks of a trainer, and a generator on another host."""

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks, self.numbers = n_ranks, 0
        self.start()
        self.holder = ImageHolder()

    def start(self) -> None:
        self.buffers = [PartBuffers(rank) for rank in range(self.n_ranks)]

    def publish(self, version: int) -> None:
        for buffers, rows in zip(self.buffers, on_ranks(weights_of(version), self.n_ranks), strict=True):
            buffers.copy(version, rows, torch.bfloat16)

    def remotes(self) -> list[RemoteMemory]:
        shared = [buffers.share() for buffers in self.buffers]
        assert not any(why for _, why in shared)
        return [remote for remote, _ in shared if remote is not None]

    async def read(self, version: int, remotes: list[RemoteMemory] | None = None, within: float = WITHIN) -> Any:
        self.numbers += 1
        sources, remotes = [buffers.source for buffers in self.buffers], remotes or self.remotes()
        path, why = await self.holder.read_image(self.numbers, version, sources, remotes, within)
        return why if path is None else (path, why)

    def is_held(self, version: int) -> bool:
        """Whether the generator holds an image with this version."""
        found = load(content(self.holder._images[self.numbers]))
        expected = weights_of(version)
        return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
async def test_an_image_has_the_bytes_of_all_ranks_and_the_next_one_lies_in_the_same_memory(
    nixl: type[FakeAgent], n_ranks: int
) -> None:
    ranks, paths = Ranks(n_ranks), set[str]()
    for version in (1, 2, 3):
        ranks.publish(version)
        path, _ = await ranks.read(version)
        assert ranks.is_held(version)
        paths.add(path)
        await ranks.holder.release_image(ranks.numbers)
    assert len(paths) == 1
    assert len(nixl.all) == n_ranks + 1
    ranks.start()  # the trainer's processes start anew
    ranks.publish(4)
    path, _ = await ranks.read(4)
    assert {path} == paths and ranks.is_held(4)
    gc.collect()
    assert len(nixl.all) == n_ranks + 1


@pytest.mark.parametrize(
    ("at", "found", "reads"),
    [(1, "3", 2), (2, "1, 3", 2), (3, "3", 6), (4, "3", 6), (5, "3", 6), (6, "1, 3", 6)],
)
async def test_weights_that_are_replaced_at_any_read_are_not_held_and_those_gone_before_are_not_read(
    nixl: type[FakeAgent], at: int, found: str, reads: int
) -> None:
    """Two ranks are read six times: their versions, their parts, their versions."""
    ranks, begun = Ranks(2), 0
    ranks.publish(1)

    def replaced() -> None:
        nonlocal begun
        begun += 1
        if begun == at:
            for version in (2, 3):
                ranks.publish(version)

    nixl.before_read = staticmethod(replaced)
    assert await ranks.read(1) == f"there are other weights (versions [{found}], not 1)"
    assert begun == reads
    assert not ranks.holder._images
    await ranks.read(3)
    assert ranks.is_held(3)


async def test_a_rank_that_has_ended_is_a_reason_and_its_successor_is_read(nixl: type[FakeAgent]) -> None:
    ranks = Ranks(2)
    ranks.publish(1)
    old = ranks.remotes()
    ranks.start()
    ranks.publish(1)
    gc.collect()
    assert await ranks.read(1, old) == "NIXL failed (NixlError: NIXL_ERR_REMOTE_DISCONNECT)"
    await ranks.read(1)
    assert ranks.is_held(1)


async def test_memory_of_a_read_that_does_not_end_is_never_used_again(nixl: type[FakeAgent]) -> None:
    ranks = Ranks(1)
    ranks.publish(1)
    first, _ = await ranks.read(1)
    await ranks.holder.release_image(ranks.numbers)
    (shared,) = ranks.remotes()
    (reader,) = {*nixl.all} - {shared.agent.decode()}
    nixl.state = "PROC"
    assert await ranks.read(1, within=0.05) == "NIXL did not read the weights in time"
    async with asyncio.timeout(WITHIN):  # what reads still ends with its agent
        while reader in nixl.all:
            await asyncio.sleep(0.01)
            gc.collect()
    nixl.state = "DONE"
    path, _ = await ranks.read(1)
    assert path != first and ranks.is_held(1)


async def test_of_many_images_at_once_the_memory_of_few_is_kept_and_the_next_one_lies_in_it(
    nixl: type[FakeAgent],
) -> None:
    ranks = Ranks(1)
    ranks.publish(1)
    paths = [(await ranks.read(1))[0] for _ in range(SPARE + 3)]
    for number in range(1, ranks.numbers + 1):
        await ranks.holder.release_image(number)
    gc.collect()
    assert [path for path in paths if is_open(path)] == paths[-SPARE:]
    (path, _), (again, _) = await ranks.read(1), await ranks.read(1)
    assert {path, again} == {*paths[-SPARE:]} and ranks.is_held(1)


async def test_memory_that_is_released_while_another_image_is_read_is_freed_after_the_read(
    nixl: type[FakeAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, reads, go_on = Ranks(1), threading.Event(), threading.Event()
    ranks.publish(1)

    def before_read() -> None:
        reads.set()
        assert go_on.wait(WITHIN)

    monkeypatch.setattr(nixl, "before_read", staticmethod(before_read))
    reading = asyncio.create_task(ranks.read(1))
    assert await asyncio.to_thread(reads.wait, WITHIN)
    numbers = range(100, 100 + SPARE + 3)
    paths = [await ranks.holder.hold_image(number, 1, ranks.buffers[0].source.part.n_bytes) for number in numbers]
    for number in numbers:
        await ranks.holder.release_image(number)
    go_on.set()
    await reading
    gc.collect()
    assert [path for path in paths if is_open(path)] == paths[-SPARE:]


def is_open(path: str) -> bool:
    """Whether this process still has the memory mapped or open."""
    inode = path.partition("#")[2]
    mapped = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()}
    return inode in mapped or inode in {str(fd.stat().st_ino) for fd in Path("/proc/self/fd").iterdir() if fd.exists()}


async def test_an_image_that_was_released_before_it_was_read_is_not_held(nixl: type[FakeAgent]) -> None:
    ranks = Ranks(1)
    ranks.publish(1)
    await ranks.holder.release_image(ranks.numbers + 1)
    assert await ranks.read(1) == "the image was read too late"


async def test_after_its_release_an_image_is_held_by_no_late_call(nixl: type[FakeAgent]) -> None:
    ranks = Ranks(1)
    ranks.publish(1)
    await ranks.read(1)
    number = ranks.numbers
    await ranks.holder.release_image(number)
    with pytest.raises(WeightsGone):
        await ranks.holder.hold_image(number, 1, 8)
    ranks.numbers -= 1
    assert await ranks.read(1) == "the image was read too late"


async def test_an_image_that_came_by_another_way_meanwhile_stays(nixl: type[FakeAgent]) -> None:
    ranks = Ranks(1)
    ranks.publish(1)
    path = await ranks.holder.hold_image(ranks.numbers + 1, 1, ranks.buffers[0].source.part.n_bytes)
    assert await ranks.read(1) == "the image was read too late"
    assert await ranks.holder.hold_image(ranks.numbers, 1, 0) == path


async def test_an_error_of_our_own_is_not_taken_for_one_of_nixl(nixl: type[FakeAgent]) -> None:
    ranks = Ranks(2)
    ranks.publish(1)
    with pytest.raises(ValueError, match="zip"):
        await ranks.read(1, ranks.remotes()[:1])


def test_without_nixl_or_rdma_a_rank_says_so(rdma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NIXL, None)
    remote, why = PartBuffers().share()
    assert remote is None and why.startswith("NIXL cannot be imported")
    (rdma / "mlx5_0").rmdir()
    assert PartBuffers().share() == (None, "a host has no network card with RDMA")
    rdma.rmdir()
    assert PartBuffers().share() == (None, "a host has no network card with RDMA")


def test_a_nixl_without_plugins_is_a_reason(nixl: type[FakeAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    def without_plugins(name: str, config: Any) -> None:
        raise RuntimeError("No plugins available")

    monkeypatch.setattr(sys.modules[NIXL], "nixl_agent", without_plugins)
    assert PartBuffers().share() == (None, "NIXL failed (RuntimeError: No plugins available)")


@pytest.mark.parametrize("name", ["register_memory", "add_remote_agent", "initialize_xfer", "transfer"])
@pytest.mark.parametrize(
    "error", [RuntimeError("no device"), MemoryError(), OSError(12, "no memory"), TypeError("int")]
)
async def test_pythons_own_errors_out_of_nixl_are_reasons_too(
    nixl: type[FakeAgent], monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
) -> None:
    def fails(*_: Any) -> None:
        raise error

    ranks = Ranks(1)
    ranks.publish(1)
    remotes = ranks.remotes()
    monkeypatch.setattr(FakeAgent, name, fails)
    assert await ranks.read(1, remotes) == f"NIXL failed ({type(error).__name__}: {error})"
    if name == "register_memory":
        assert PartBuffers().share() == (None, f"NIXL failed ({type(error).__name__}: {error})")


def nodes_of(
    rank_0: FakeRank0, *names: str, sent: Callable[[int], None] = lambda n_bytes: None, deadline: float = WITHIN
) -> tuple[NodeImages, list[FakeGenerator]]:
    """A generator on each of some nodes."""
    generators = [FakeGenerator(name, []) for name in names]
    images = NodeImages({each.name: each for each in generators}, rank_0, deadline, sent)  # type: ignore[arg-type]
    for each in generators:
        images.register(each.name, f"node of {each.name}")
    return images, generators


def published(step: int) -> PublishedWeights:
    return PublishedWeights(PolicyVersion(1, step), sources=ONE_BUCKET)


async def test_only_nodes_that_could_not_read_get_buckets_and_after_some_failures_all_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    rank_0 = FakeRank0()
    step, sent = 0, list[int]()
    images, generators = nodes_of(rank_0, "a", "b", "c", sent=sent.append)

    async def buckets() -> int:
        """The buckets that one more publication sends."""
        nonlocal step
        step, before = step + 1, rank_0.buckets
        weights = published(step)
        async with images.spread(["a", "b", "c"], weights), path_for(images, "b", weights) as path:
            assert path is not None
        return rank_0.buckets - before

    assert await buckets() > 0, "the rank has no NIXL"
    rank_0.remote = RemoteMemory(b"rank", 0), ""
    assert await buckets() == 0
    assert sent == [48, 48], "to each of three nodes"
    assert [each.read_from for each in generators] == [["rank"]] * 3
    generators[1].unread = ["no route"] * MAX_FAILURES
    assert [await buckets() > 0 for _ in range(MAX_FAILURES)] == [True] * MAX_FAILURES
    assert await buckets() > 0, "it is not tried any more"
    assert [record.message for record in caplog.records] == [
        "weights go to other hosts through Ray's object store: NIXL cannot be imported",
        "weights go to other hosts with NIXL",
        "weights go to other hosts through Ray's object store: no route",
    ]


async def test_a_read_that_hangs_inside_nixl_leaves_its_node_to_the_buckets() -> None:
    rank_0 = FakeRank0()
    rank_0.remote = RemoteMemory(b"rank", 0), ""
    images, (hangs, _) = nodes_of(rank_0, "a", "b", deadline=0.6)
    hangs.reading.clear()
    weights = published(1)
    async with images.spread(["a", "b"], weights):
        for name in ("a", "b"):
            async with path_for(images, name, weights) as path:
                assert path is not None
    assert rank_0.buckets > 0


async def test_a_generator_that_dies_as_it_reads_costs_its_own_node_only() -> None:
    rank_0 = FakeRank0()
    rank_0.remote = RemoteMemory(b"rank", 0), ""
    images, (first, _) = nodes_of(rank_0, "a", "b")
    first.failing["hold"] = died()
    weights = published(1)
    async with images.spread(["a", "b"], weights):
        with pytest.raises(type(died())):
            async with path_for(images, "a", weights):
                pass
        async with path_for(images, "b", weights) as path:
            assert path is not None
    assert rank_0.buckets == 0


def rank_process(connection: Connection) -> None:
    """Publish the versions that it is told, as a rank in a process of its own."""
    nixl_reads.RDMA_CARDS = Path("/sys")  # without RDMA, NIXL takes TCP or shared memory
    ranks = Ranks(1)
    while True:
        ranks.publish(connection.recv())
        connection.send((ranks.buffers[0].source, ranks.remotes()[0]))


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs NIXL")
async def test_with_nixl_itself_another_process_is_read_and_a_stopped_or_ended_one_is_a_reason(rdma: Path) -> None:
    ours, theirs = Pipe()
    code = f"from {__name__} import Connection, rank_process; rank_process(Connection({theirs.fileno()}))"
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], cwd=ROOT)
    ranks, paths = Ranks(1), set[str]()
    try:

        async def read(version: int, within: float = WITHIN) -> Any:
            ranks.numbers += 1
            path, why = await ranks.holder.read_image(ranks.numbers, version, [source], [remote], within)
            return why if path is None else (path, why)

        for version in (1, 2, 3):
            ours.send(version)
            source, remote = ours.recv()
            path, _ = await read(version)
            assert ranks.is_held(version)
            paths.add(path)
            await ranks.holder.release_image(ranks.numbers)
        assert len(paths) == 1
        assert await read(2) == "there are other weights (versions [3], not 2)"
        process.send_signal(signal.SIGSTOP)
        assert await read(3, within=0.5) == "NIXL did not read the weights in time"
        process.send_signal(signal.SIGCONT)
        await read(3)
        assert ranks.is_held(3)
        process.kill()
        process.wait(WITHIN)
        assert (await read(3, within=2.0)).startswith("NIXL")
        assert (await read(3, within=2.0)).startswith("NIXL"), "an agent that never met it"
    finally:
        process.kill()
        process.wait(WITHIN)
