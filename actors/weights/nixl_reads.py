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

Spans = Sequence[tuple[int, int, int]]
"""Spans of memory: the address in this process, the address in the other process, the number of bytes."""


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
        parts, address = [*zip(sources, remotes, strict=True)], memory.octets().data_ptr()
        self._meet({remote.agent for remote in remotes})
        for octets in (memory.whole, self._found):
            self._register(octets)
        self._check(version, parts, until)
        reads = list[tuple[RemoteMemory, Spans]]()
        for source, remote in parts:
            begin, ends = remote.address + source.start, source.part.ends
            spans = [(address + at, begin + end - n, n) for (at, n), end in zip(source.part.spans, ends, strict=True)]
            reads.append((remote, spans))
        self._all_read(reads, until)
        self._check(version, parts, until)

    def _check(self, version: int, parts: Sequence[tuple[Source, RemoteMemory]], until: float) -> None:
        words = [
            (remote, [(word.data_ptr(), remote.address + VERSION_BYTES * source.buffer, VERSION_BYTES)])
            for (source, remote), word in zip(parts, self._found, strict=True)
        ]
        self._all_read(words, until)
        if (found := set(self._found.tolist())) != {version}:
            raise ReadFailed(f"there are other weights (versions {sorted(found)}, not {version})")

    def _meet(self, agents: set[bytes]) -> None:
        for metadata in self._agents.keys() - agents:
            _asked(self._agent.remove_remote_agent, self._agents.pop(metadata))
        for metadata in agents - self._agents.keys():
            self._agents[metadata] = _asked(self._agent.add_remote_agent, metadata)

    def _register(self, octets: Tensor) -> None:
        if octets.data_ptr() not in self._registered:
            _asked(self._agent.register_memory, [(octets.data_ptr(), octets.nbytes, 0, "")], "DRAM")
            self._registered[octets.data_ptr()] = octets

    def _all_read(self, reads: Sequence[tuple[RemoteMemory, Spans]], until: float) -> None:
        begun = [self._begin(self._agents[remote.agent], spans) for remote, spans in reads if spans]
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

    def _begin(self, name: str, spans: Spans) -> Any:
        here, there, n_bytes = np.array(spans, np.uint64).T
        triples = (np.stack([at, n_bytes, np.zeros_like(at)], 1) for at in (here, there))
        places = [_asked(self._agent.get_xfer_descs, triple, "DRAM") for triple in triples]
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
