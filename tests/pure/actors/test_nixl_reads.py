"""A node's image is read from the buffers of the ranks with NIXL: the right bytes of one version, or a reason."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib.util
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
from actors.weights.image import ImageHolder
from actors.weights.nixl_reads import RemoteMemory
from actors.weights.part_buffers import PartBuffers
from tests.pure.actors.fakes import content, copied, given_by

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
        self.n_ranks, self.holder = n_ranks, ImageHolder()
        self.start()

    def start(self) -> None:
        self.buffers = [PartBuffers(rank) for rank in range(self.n_ranks)]

    def publish(self, version: int) -> None:
        copied(version, weights_of(version), self.buffers)

    def remotes(self) -> list[RemoteMemory]:
        shared = [buffers.share() for buffers in self.buffers]
        assert not any(why for _, why in shared)
        return [remote for remote, _ in shared if remote is not None]

    async def read(self, version: int, remotes: list[RemoteMemory] | None = None, within: float = WITHIN) -> str:
        """The image's path, or why it could not be read."""
        sources = [buffers.source for buffers in self.buffers]
        path, why = await self.holder.read_image(version, sources, remotes or self.remotes(), within)
        return why if path is None else path

    def is_held(self, version: int) -> bool:
        """Whether the generator holds the image of this version."""
        found, expected = load(content(self.holder._memory)), weights_of(version)
        return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.fixture
def rank(nixl: type[FakeAgent]) -> Ranks:
    """One rank, which has published version 1."""
    made = Ranks(1)
    made.publish(1)
    return made


@pytest.mark.parametrize("n_ranks", [1, 4])
async def test_an_image_has_the_bytes_of_all_ranks_and_the_next_one_lies_in_the_same_memory(
    nixl: type[FakeAgent], n_ranks: int
) -> None:
    ranks, paths = Ranks(n_ranks), set[str]()
    for version in (1, 2, 3):
        ranks.publish(version)
        paths.add(await ranks.read(version))
        assert ranks.is_held(version)
    assert len(paths) == 1 and len(nixl.all) == n_ranks + 1
    ranks.start()  # the trainer's processes start anew
    ranks.publish(4)
    assert {await ranks.read(4)} == paths and ranks.is_held(4)
    assert await ranks.read(3) == "a newer version of the weights is held"
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
    await ranks.read(3)
    assert ranks.is_held(3)


async def test_a_rank_that_has_ended_is_a_reason_and_its_successor_is_read(rank: Ranks) -> None:
    old = rank.remotes()
    rank.start()
    rank.publish(1)
    gc.collect()
    assert await rank.read(1, old) == "NIXL failed (NixlError: NIXL_ERR_REMOTE_DISCONNECT)"
    await rank.read(1)
    assert rank.is_held(1)


async def test_memory_of_a_read_that_does_not_end_is_never_used_again(nixl: type[FakeAgent], rank: Ranks) -> None:
    first = await rank.read(1)
    (shared,) = rank.remotes()
    (reader,) = {*nixl.all} - {shared.agent.decode()}
    nixl.state = "PROC"
    rank.publish(2)
    assert await rank.read(2, within=0.05) == "NIXL did not read the weights in time"
    async with asyncio.timeout(WITHIN):  # what reads still ends with its agent
        while reader in nixl.all:
            await asyncio.sleep(0.01)
            gc.collect()
    nixl.state = "DONE"
    assert await rank.read(2) != first and rank.is_held(2)


async def test_a_read_that_the_driver_did_not_wait_for_leaves_the_image_to_the_buckets(
    nixl: type[FakeAgent], rank: Ranks
) -> None:
    reads, go_on, n_bytes = threading.Event(), threading.Event(), rank.buffers[0].part.n_bytes

    def before_read() -> None:
        reads.set()
        assert go_on.wait(WITHIN)

    nixl.before_read = staticmethod(before_read)
    reading = asyncio.create_task(rank.read(1))
    assert await asyncio.to_thread(reads.wait, WITHIN)
    path = await rank.holder.hold_image(1, n_bytes)
    await rank.holder.write_image(1, *given_by(rank.buffers[0]))
    assert await rank.holder.hold_image(1, n_bytes) == path, "asked for again, it is the same"
    go_on.set()
    assert await reading == "the image was read too late"
    assert rank.holder._memory.path == path and rank.is_held(1)


def test_without_nixl_its_plugins_or_rdma_a_rank_says_so(nixl: type[FakeAgent], rdma: Path) -> None:
    def without_plugins(name: str, config: Any) -> None:
        raise RuntimeError("No plugins available")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys.modules[NIXL], "nixl_agent", without_plugins)
        assert PartBuffers().share() == (None, "NIXL failed (RuntimeError: No plugins available)")
        patched.setitem(sys.modules, NIXL, None)
        remote, why = PartBuffers().share()
        assert remote is None and why.startswith("NIXL cannot be imported")
    (rdma / "mlx5_0").rmdir()
    assert PartBuffers().share() == (None, "a host has no network card with RDMA")


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
    ranks, paths = Ranks(1), set[str | None]()

    async def read(version: int, within: float = WITHIN) -> tuple[str | None, str]:
        return await ranks.holder.read_image(version, [source], [remote], within)

    try:
        for version in (1, 2, 3):
            ours.send(version)
            source, remote = ours.recv()
            paths.add((await read(version))[0])
            assert ranks.is_held(version)
        assert len(paths) == 1
        process.send_signal(signal.SIGSTOP)
        assert await read(3, within=0.5) == (None, "NIXL did not read the weights in time")
        process.send_signal(signal.SIGCONT)
        await read(3)
        assert ranks.is_held(3)
        process.kill()
        process.wait(WITHIN)
        assert (await read(3, within=2.0))[1].startswith("NIXL")
        assert (await read(3, within=2.0))[1].startswith("NIXL"), "an agent that never met it"
    finally:
        process.kill()
        process.wait(WITHIN)
