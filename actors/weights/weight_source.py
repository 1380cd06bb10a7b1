"""The interface through which the code that sends weights to the engines uses the trainer's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from actors.weights.nixl_reads import RemoteMemory
from actors.weights.part import Source, WeightBucket
from service.errors import BatonError
from service.types import PolicyVersion

TRAINER = "trainer"
"""Name of all ranks together in `service.run.liveness.supervisor.Supervisor`."""


class TrainerLost(BatonError):
    """A rank died, raised an error or did not answer, so the trainer's ranks cannot continue.

    `is_remedied`: whether the rank ran out of memory, and the ranks will need less memory from their next start on.
    """

    def __init__(self, why: str, is_remedied: bool = False) -> None:
        super().__init__(why)
        self.is_remedied = is_remedied


@dataclass(frozen=True)
class PublishedWeights:
    """One version of the weights that is sent to the engines."""

    version: PolicyVersion
    sources: tuple[Source, ...] = ()
    """Each rank's part of the safetensors file, with the place from which processes of its host read the part; empty
    for transport `ipc`."""

    @property
    def sizes(self) -> list[int]:
        """Return the number of bytes of each rank's part."""
        return [source.part.n_bytes for source in self.sources]


class WeightSource(Protocol):
    """The methods of `actors.trainer.group.TrainerGroup` that concern weights; each raises `TrainerLost` if a rank
    fails."""

    @property
    def nodes(self) -> Sequence[str]:
        """Return the id of each rank's node."""

    async def remotes(self) -> list[tuple[RemoteMemory | None, str]]:
        """Let generators of other hosts read each rank's part of the weights. Returns for each rank its memory and an
        empty text, or None and the reason why NIXL cannot be used."""

    async def bucket(self, version: PolicyVersion, rank: int, start: int, stop: int) -> tuple[WeightBucket, Any] | None:
        """Return the description of a rank's bytes from `start` to `stop`, and a Ray reference to the bytes; None if
        the rank has newer weights."""

    async def ipc_handles(self, number: int, version: PolicyVersion) -> tuple[bytes, int] | None:
        """Return an announcement with memory handles of a rank's weights, and the announcement's checksum.

        `number`: the number of the rank. The handles are for one update of the engine on the rank's GPU. None: the
        rank has newer weights.
        """
