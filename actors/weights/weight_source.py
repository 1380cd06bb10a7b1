"""What the code that sends weights to the engines gets from the trainer's ranks (`actors.trainer.group`)."""

from __future__ import annotations

from dataclasses import dataclass

from actors.weights.part import Source
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


MIN_BYTES_PER_SECOND = 100e6
"""Rate at which weights must arrive at an engine; Ray's object store brings several times as many to another host."""


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

    def seconds(self, deadline: float) -> float:
        """Return `deadline` and the seconds that the bytes may take."""
        return deadline + sum(self.sizes) / MIN_BYTES_PER_SECOND
