"""The status of the buffer: its groups, tokens and scorers, and who has to wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from service.types import PolicyVersion


class Waiting(NamedTuple):
    """Who has to wait, for what (`WaitReason` or `silent`), the reason in words, and for how many seconds so far."""

    who: str
    reason: str
    detail: str
    seconds: float


@dataclass
class ScorerStatus:
    """Counts of the groups that a scorer scores, since the buffer's process started."""

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
    """The status of the buffer after a number of events (`revision`); the `tokens` by fate add up to `accepted_tokens`.
    `ledger.state.State` describes the fields that come from the ledger."""

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
    """The smallest group_id that may still change: all groups before it have ended, or are trained for good."""
    next_slot: int
    lookahead: int
    lengths: dict[str, list[int]]
    """Histograms of trajectories, and of their tokens, by length: see `Lengths`."""
    length_distance: float
    """Distance between the length distributions of trained and of generated trajectories, from 0 (equal) to 1."""
    token_length_distance: float
    """As `length_distance`, but trained trajectories count by tokens with loss, generated ones by sampled tokens."""
    n_bytes: int
    """Bytes of the accepted steps in memory."""
    reserved_bytes: int
    """`n_bytes`, plus the maximum that open trajectories may still add."""
    waits: tuple[Waiting, ...]
    refused: dict[str, int]
    """Refused calls since this process started, by reason."""
    restarts: dict[str, int]
    given_up: dict[str, int]
    duplicates: int
    """Messages that had been accepted before, counted since this process started."""
    late: int
    """Messages with content that came too late (`Receipt.late`), counted since this process started."""
    journal_start: int
    journal_position: int
    journal_synced: int
    journal_limit_bytes: int
    """Bytes of the journal that steps may take; when they are used up, no more groups are admitted."""
    draining: str | None
    prompts: dict[str, int]
    """With a curriculum: number of prompts `untried`, or with a success `below`, `inside` or `above` the band."""
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
