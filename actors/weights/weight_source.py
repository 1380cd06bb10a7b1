"""Where weights come from: the trainer's ranks, as those see them who take the weights to the engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from actors.weights.delta import WeightBucket
from actors.weights.part import WeightPart
from actors.weights.weight_group import Meeting
from service.errors import BatonError
from service.types import PolicyVersion


class TrainerLost(BatonError):
    """A rank died, raised or did not answer; its group cannot continue."""


@dataclass(frozen=True)
class PublishedWeights:
    """Weights on their way to the engines."""

    data: Any
    """Ray object reference to `WeightBytes`, which every engine takes."""
    checksum: int
    parts: tuple[WeightPart, ...] = ()
    """Of the safetensors file whose buckets the ranks give out, that of each rank; none: they give out none."""


class WeightSource(Protocol):
    """The calls of `actors.trainer.group.TrainerGroup` about weights; each raises `TrainerLost` if a rank fails."""

    @property
    def nodes(self) -> Sequence[str]:
        """The id of each rank's node."""

    async def bucket(
        self, version: PolicyVersion, rank: int, start: int, stop: int, whole: bool = False
    ) -> tuple[WeightBucket, Any] | None:
        """Bytes of a rank's part of these weights, and a reference to their message; None if newer ones are there."""

    async def ipc_handles(self, number: int, version: PolicyVersion) -> PublishedWeights | None:
        """Memory handles of a rank's weights, for one update of the engine on its GPU; None if newer ones are there."""

    async def begin_send(self, version: PolicyVersion, meeting: Meeting) -> bool:
        """Let rank 0 begin to send weights to a group of engines; False if a newer version has replaced them."""
