"""What the buffer says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from service.types import PolicyVersion


class Waiting(NamedTuple):
    """Someone who waits: who, for what (`WaitReason` or `silent`), in words, and for how many seconds."""

    who: str
    reason: str
    detail: str
    seconds: float


@dataclass(frozen=True)
class BufferStatus:
    """The buffer at one revision of its ledger; the tokens by fate sum to `accepted_tokens`."""

    revision: int
    """Events applied so far."""
    policy_version: PolicyVersion
    groups: dict[str, int]
    """Groups by state; the ended ones too."""
    ended: dict[str, int]
    """Groups that ended, by `state/reason`."""
    accepted_tokens: int
    tokens: dict[str, int]
    """Accepted tokens by fate."""
    issued: int
    """Ordinals issued so far; the next one's number."""
    frontier: int
    """Every group_id below has come to its end."""
    next_slot: int
    lookahead: int
    """Mini-batches that may be open beyond the one that the served version trains."""
    lengths: dict[str, list[int]]
    """Trajectories, and their tokens, by length: see `Lengths`."""
    length_distance: float
    """How far the lengths of trained trajectories are from those of generated ones, 0 to 1."""
    token_length_distance: float
    """The same over tokens that carried loss and tokens that were sampled."""
    n_bytes: int
    """Bytes of accepted steps in memory."""
    reserved_bytes: int
    """The same with what open trajectories may still need at worst."""
    waits: tuple[Waiting, ...]
    refused: dict[str, int]
    """Refused messages since this process started, by reason."""
    restarts: dict[str, int]
    """Trajectories that started anew, by reason."""
    given_up: dict[str, int]
    """Trajectories that their group went on without, by reason."""
    duplicates: int
    """Messages since this process started that brought nothing new."""
    late: int
    """Messages since this process started that brought steps of a replaced attempt or an ended group."""
    journal_start: int
    """What lies before it was given up."""
    journal_position: int
    journal_synced: int
    draining: str | None

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values for JSON."""
        values = dict(vars(self))
        values["policy_version"] = str(self.policy_version)
        values["waits"] = [wait._asdict() for wait in self.waits]
        return values
