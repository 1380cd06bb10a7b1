"""Arguments and results of the buffer's five verbs, claim, submit, lease, commit and release; and its status.

prompts --claim--> GENERATOR --submit--> BUFFER --lease--> TRAINER --publish--> WEIGHTS
                                           +--- commit / release ---+
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from service.types import PolicyVersion, Refusal, TrajectoryId


class Claim(NamedTuple):
    """A generator's request for one group of work."""

    generator: str
    incarnation: int
    """The incarnation that `Buffer.join` returned."""
    serving: PolicyVersion
    """The version that the generator's engine serves now; no sample of the group starts on an older version."""
    request_id: int = 0
    """The claim's id within its incarnation: a repeated claim gets the same work; 0: the claim is never repeated."""
    only_moved: bool = False
    """Whether the generator has room only for trajectories that another generator began."""


class Assignment(NamedTuple):
    """Work for a generator: trajectories of one group, by their numbers in the group (`samples`)."""

    group_id: int
    prompt_uid: str
    row: int
    """The prompt's row in the dataset."""
    samples: tuple[int, ...]
    attempts: tuple[int, ...]
    steps: tuple[bytes, ...] = ()
    """The accepted steps of each sample, after which the generator continues, encoded as a message; empty bytes for a
    sample without steps, () if no sample has any."""
    moved: tuple[int, ...] = ()
    """The samples that another generator began, and that this generator continues."""

    def trajectories(self) -> Iterator[tuple[TrajectoryId, bytes]]:
        """Yield the id of each trajectory, with its encoded steps (empty bytes if it has none)."""
        steps = self.steps or (b"",) * len(self.samples)
        for sample, attempt, sent in zip(self.samples, self.attempts, steps, strict=True):
            yield TrajectoryId(self.group_id, sample, attempt), sent


class WaitReason(StrEnum):
    """Why a claim, a lease or the journal has to wait; also a label of `baton_generator_wait_seconds`."""

    LOOKAHEAD = "lookahead"
    """A claim waits: the next group needs newer weights than the generator's engine serves."""
    BYTES = "bytes"
    """A claim waits: the worst case of one more group does not fit into `max_bytes`."""
    DISK = "disk"
    """A claim waits: the journal or its disk is full. Or the journal waits: its disk is too full to store events."""
    ANSWERED = "answered"
    """The claim was answered before; its work is finished or was given to another generator."""
    ROOM = "room"
    """A claim waits: the generator is full, and no trajectory has to move."""
    DRAINED = "drained"
    """The run ends: a claim gets no more work, or too few groups are left for a lease."""
    GROUPS = "groups"
    """A lease waits: fewer than `mini_batch_size` groups are complete."""
    FILTERED = "filtered"
    """A lease waits: hundreds of groups in a row were filtered, so no mini-batch is expected."""
    SLOT = "slot"
    """A lease with `order: strict` waits: the groups that are next in order are not complete."""


class Wait(NamedTuple):
    """The answer to a claim or a lease that has to wait: the reason, also in words, and since when (monotonic)."""

    reason: WaitReason
    detail: str
    since: float


ClaimAnswer = list[Assignment] | Wait | Refusal

LEAVES, RESUMED = "leaves", "the run is resumed"
"""Reasons why a generator is gone although it did not die."""


class Receipt(NamedTuple):
    """The answer to a step group that was accepted now or before; valid once the journal of that moment is on disk."""

    duplicate: bool = False
    late: tuple[TrajectoryId, ...] = ()
    """Trajectories whose content came too late, because the group ended or continues with another attempt or without
    them: the generator stops playing them. Empty if the whole message is a duplicate."""
    wanted: int = 1
    """This generator's share of the complete groups that the next mini-batch lacks: a message that completes this many
    is sent at once."""


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
    """The status of the buffer after `revision` events; fields of the ledger are described by `ledger.state.State`.

    The `tokens` by fate add up to `accepted_tokens`; `refused`, `duplicates` and `late` (messages that were accepted
    before, or came too late) count since this process started.
    """

    revision: int
    policy_version: PolicyVersion
    groups: dict[str, int]
    """Number of groups by state, ended groups included."""
    ended: dict[str, int]
    accepted_tokens: int
    tokens: dict[str, int]
    issued: int
    """Number of groups issued so far; also the next group_id."""
    lookahead: int
    lengths: dict[str, list[int]]
    length_distance: float
    """Distance between the length distributions of trained and of generated trajectories, from 0 (equal) to 1."""
    token_length_distance: float
    """As `length_distance`, but trained trajectories count by tokens with loss, generated ones by sampled tokens."""
    n_bytes: int
    reserved_bytes: int
    """`n_bytes`, plus the maximum that open trajectories may still add."""
    waits: tuple[Waiting, ...]
    refused: dict[str, int]
    restarts: dict[str, int]
    given_up: dict[str, int]
    duplicates: int
    late: int
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
        values["scorers"] = {name: vars(scorer) for name, scorer in self.scorers.items()}
        return values
