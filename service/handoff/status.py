"""The buffer's status."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from service.types import PolicyVersion


class Waiting(NamedTuple):
    """One wait: who waits, for what (`WaitReason` or `silent`), the reason in words, and for how many seconds."""

    who: str
    reason: str
    detail: str
    seconds: float


@dataclass
class ScorerStatus:
    """A scorer's groups, counted since the buffer's process started."""

    waiting: int = 0
    """Groups that wait for the scorer now."""
    scored: int = 0
    """Groups with a valid answer."""
    fallbacks: int = 0
    """Groups that continued without an answer (`fallback: environment_reward`)."""
    refused: int = 0
    """Groups that were refused without an answer."""
    failures: Counter[str] = field(default_factory=Counter)
    """Requests without a valid answer, by reason."""
    last_failure: str = ""
    seconds: float = 0.0
    """Seconds for which the scorer's workers were busy, summed over workers."""


@dataclass(frozen=True)
class BufferStatus:
    """The buffer at one revision of its ledger; the tokens by fate sum to `accepted_tokens`. Fields of the ledger's
    state are described at `ledger.state.State`."""

    revision: int
    policy_version: PolicyVersion
    groups: dict[str, int]
    """Number of groups by state, ended groups included."""
    ended: dict[str, int]
    accepted_tokens: int
    tokens: dict[str, int]
    issued: int
    """Number of groups issued so far; also the next group_id."""
    frontier: int
    """Every group with a smaller group_id has ended."""
    next_slot: int
    lookahead: int
    lengths: dict[str, list[int]]
    """Histograms of trajectories, and of their tokens, by length: see `Lengths`."""
    length_distance: float
    """Distance of the lengths of trained trajectories from those of generated ones, 0 to 1."""
    token_length_distance: float
    """The same distance in tokens: tokens that carried loss against sampled tokens, 0 to 1."""
    n_bytes: int
    """Bytes of the accepted steps in memory."""
    reserved_bytes: int
    """`n_bytes`, plus the maximum that open trajectories may still add."""
    waits: tuple[Waiting, ...]
    refused: dict[str, int]
    """Refused calls since this process started, by reason."""
    restarts: dict[str, int]
    given_up: dict[str, int]
    moved: int
    duplicates: int
    """Repeated messages, which had been accepted before, since this process started."""
    late: int
    """Messages with content that came too late (`Receipt.late`), since this process started."""
    journal_start: int
    journal_position: int
    journal_synced: int
    journal_limit_bytes: int
    """Bytes of the journal that steps may take; when they are used up, no more groups are admitted."""
    draining: str | None
    prompts: dict[str, int]
    """With a curriculum: prompts that are `untried`, or whose success is `below` the band, `inside` or `above`."""
    passed_over: int
    """Places in the order of prompts that the curriculum skipped."""
    scorers: dict[str, ScorerStatus]

    def as_dict(self) -> dict[str, Any]:
        """The status as plain values for JSON."""
        values = dict(vars(self))
        values["policy_version"] = str(self.policy_version)
        values["waits"] = [wait._asdict() for wait in self.waits]
        values["scorers"] = {
            name: vars(scorer) | {"failures": dict(scorer.failures)} for name, scorer in self.scorers.items()
        }
        return values
