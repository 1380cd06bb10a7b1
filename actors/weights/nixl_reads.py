"""Reads other hosts' memory with NIXL. A node's image is filled from the buffers of the ranks or from the image of
another node, over RDMA, and no process makes an intermediate copy.

    rank's process        shares the memory  | versions | buffer 0 | buffer 1 |  once, as RemoteMemory
    generator's process   READs the version,  then each span of the rank's part into the span's place in the image,
                          then the version again

The version of a buffer is removed before the buffer is written. A version that is still there after all spans were read
thus shows that no span was replaced meanwhile. A version contains the trainer's incarnation, and the name of a NIXL
agent is never used again, so a restarted rank is not mistaken for its earlier process. NIXL:
https://github.com/ai-dynamo/nixl.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.weights.memory import WeightMemory
from actors.weights.part import Source
from service.errors import BatonError

RDMA_CARDS = Path("/sys/class/infiniband")
"""The kernel's list of network cards with RDMA, including EFA. Without such a card NIXL is not used, because NIXL over
TCP is slower than Ray's object store."""
POLL_SECONDS = 0.001
"""Seconds between two checks of reads in progress."""
VERSION_BYTES = 8

Spans = NDArray[np.uint64]
"""Spans of memory, [spans, 3]: address, number of bytes, device 0."""


class ReadFailed(BatonError):
    """Weights could not be read from the memory of another host."""


class RemoteMemory(NamedTuple):
    """The data with which processes of other hosts read the `WeightMemory` of a process."""

    agent: bytes
    """The metadata of the process's NIXL agent: its name, its network addresses, the keys of its memory."""
    address: int
    """Address of the memory in the process."""


class NixlAgent:
    """Reads from the memory of other hosts, and lets other hosts read memory of this process, until the agent is
    deleted. After an error the agent must be deleted, because a read may still be in progress and ends only with the
    agent."""

    def __init__(self) -> None:
        """Start an agent under a name that no other agent has had.

        Raises:
            ReadFailed: this host has no network card with RDMA, or no NIXL, or NIXL has no plugin.
        """
        if not RDMA_CARDS.is_dir() or not any(RDMA_CARDS.iterdir()):
            raise ReadFailed("a host has no network card with RDMA")
        try:
            nixl = importlib.import_module("nixl._api")
        except ImportError as error:
            raise ReadFailed(f"NIXL cannot be imported ({error})") from error
        config = _asked(nixl.nixl_agent_config, backends=["UCX"])
        self._agent = _asked(nixl.nixl_agent, f"baton-{uuid4().hex}", config)
        self._found = torch.empty(0, dtype=torch.int64)
        """The versions that were read, one for each part."""
        self._registered: dict[int, Tensor] = {}
        """Registered memory, by address."""
        self._agents: dict[bytes, str] = {}
        """Names of the other agents, by their metadata."""

    def share(self, memory: WeightMemory) -> RemoteMemory:
        """Let other hosts read this memory; raises `ReadFailed` if NIXL fails."""
        self._register(memory.whole)
        return RemoteMemory(_asked(self._agent.get_agent_metadata), memory.whole.data_ptr())

    def read(
        self,
        version: int,
        sources: Sequence[Source],
        remotes: Sequence[RemoteMemory],
        memory: WeightMemory,
        within: float,
    ) -> None:
        """Read all parts of a file into the only buffer of this memory, in at most `within` seconds.

        Raises:
            ReadFailed: a source has another version, has ended or cannot be reached, or the time is over.
        """
        until = time.monotonic() + within
        if len(self._found) != len(remotes):
            self._found = torch.empty(len(remotes), dtype=torch.int64)
        parts, at = [*zip(sources, remotes, strict=True)], memory.octets().data_ptr()
        self._meet({remote.agent for remote in remotes})
        for octets in (memory.whole, self._found):
            self._register(octets)
        self._check(version, parts, until)
        self._all_read([(remote, *_spans(source, remote, at)) for source, remote in parts], until)
        self._check(version, parts, until)

    def _check(self, version: int, parts: Sequence[tuple[Source, RemoteMemory]], until: float) -> None:
        """Read the version of every part; raises `ReadFailed` if the version of a part is not `version`."""
        versions = zip(parts, self._found, strict=True)
        self._all_read([(part[1], *_version_span(*part, into=word)) for part, word in versions], until)
        if (found := set(self._found.tolist())) != {version}:
            raise ReadFailed(f"there are other weights (versions {sorted(found)}, not {version})")

    def _meet(self, agents: set[bytes]) -> None:
        """Add these agents as NIXL's remote agents, and remove all others."""
        for metadata in self._agents.keys() - agents:
            _asked(self._agent.remove_remote_agent, self._agents.pop(metadata))
        for metadata in agents - self._agents.keys():
            self._agents[metadata] = _asked(self._agent.add_remote_agent, metadata)

    def _register(self, octets: Tensor) -> None:
        if octets.data_ptr() not in self._registered:
            _asked(self._agent.register_memory, [(octets.data_ptr(), octets.nbytes, 0, "")], "DRAM")
            self._registered[octets.data_ptr()] = octets

    def _all_read(self, reads: Sequence[tuple[RemoteMemory, Spans, Spans]], until: float) -> None:
        """Read spans from several processes at once; returns when all spans have arrived."""
        begun = [self._begin(self._agents[remote.agent], here, there) for remote, here, there in reads if len(here)]
        try:
            for handle in begun:
                while (state := _asked(self._agent.check_xfer_state, handle)) == "PROC":
                    if time.monotonic() > until:
                        raise ReadFailed("NIXL did not read the weights in time")
                    time.sleep(POLL_SECONDS)
                if state != "DONE":
                    raise ReadFailed(f"NIXL could not read the weights ({state})")
        finally:
            for handle in begun:
                _asked(self._agent.release_xfer_handle, handle)

    def _begin(self, name: str, here: Spans, there: Spans) -> Any:
        places = [_asked(self._agent.get_xfer_descs, spans, "DRAM") for spans in (here, there)]
        handle = _asked(self._agent.initialize_xfer, "READ", *places, name)
        _asked(self._agent.transfer, handle)
        return handle


def _asked(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call NIXL; raises `ReadFailed` for any error, because NIXL's errors have no class in common and its C++ code also
    raises Python's own."""
    try:
        return function(*arguments, **named)
    except Exception as error:
        raise ReadFailed(f"NIXL failed ({type(error).__name__}: {error})") from error


def _spans(source: Source, remote: RemoteMemory, address: int) -> tuple[Spans, Spans]:
    """Return the spans of a part in a file at `address` of this process, and in the memory of the other process.

    >>> from actors.weights.part import WeightPart
    >>> source = Source(WeightPart(((0, 8), (20, 4))), "", start=4096)
    >>> [spans.tolist() for spans in _spans(source, RemoteMemory(b"", 100_000), 500)]
    [[[500, 8, 0], [520, 4, 0]], [[104096, 8, 0], [104104, 4, 0]]]
    """
    part = source.part
    at, n_bytes = np.array(part.spans, np.uint64).reshape(-1, 2).T
    begin = np.array(part.ends, np.uint64) - n_bytes + np.uint64(remote.address + source.start)
    device = np.zeros_like(n_bytes)
    return np.stack([at + np.uint64(address), n_bytes, device], 1), np.stack([begin, n_bytes, device], 1)


def _version_span(source: Source, remote: RemoteMemory, into: Tensor) -> tuple[Spans, Spans]:
    """Return the spans of a buffer's version: of `into` in this process, and of the memory of the other process."""
    at = remote.address + VERSION_BYTES * source.buffer
    return np.array([[into.data_ptr(), VERSION_BYTES, 0]], np.uint64), np.array([[at, VERSION_BYTES, 0]], np.uint64)
