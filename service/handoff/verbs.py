"""Arguments and results of the buffer's five verbs: claim, submit, lease, commit, release.

prompts --claim--> GENERATOR --submit--> BUFFER --lease--> TRAINER --publish--> WEIGHTS
                                           +--- commit / release ---+
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from service.types import PolicyVersion, TrajectoryId


class Claim(NamedTuple):
    """A generator's request for one group of work."""

    generator: str
    incarnation: int
    """The incarnation that `Buffer.join` returned."""
    serving: PolicyVersion
    """The version that the generator's engine serves now; no sample of the group starts on an older version."""
    request_id: int = 0
    """The claim's id within its incarnation: a repeated claim gets the same work; 0: the claim is never repeated."""


class Assignment(NamedTuple):
    """A group to generate: samples of one prompt, each with its attempt number."""

    group_id: int
    prompt_uid: str
    row: int
    """The prompt's row in the dataset."""
    samples: tuple[int, ...]
    attempts: tuple[int, ...]
    steps: tuple[bytes, ...] = ()
    """The accepted steps of each sample, as the wire bytes of a message: the generator continues after them. Empty
    bytes for a sample without steps; () if no sample of the group has steps."""

    def trajectories(self) -> Iterator[tuple[TrajectoryId, bytes]]:
        """The trajectories of the assignment, each with its steps."""
        steps = self.steps or (b"",) * len(self.samples)
        for sample, attempt, sent in zip(self.samples, self.attempts, steps, strict=True):
            yield TrajectoryId(self.group_id, sample, attempt), sent


class WaitReason(StrEnum):
    """Why a verb has no result yet; also a label of `baton_generator_wait_seconds`."""

    LOOKAHEAD = "lookahead"
    """claim: the next slot is further ahead than the engine's version allows."""
    BYTES = "bytes"
    """claim: the worst case of one more group does not fit into `max_bytes`."""
    DISK = "disk"
    """claim: the journal's disk is full; journal: events are not on the disk because it is full."""
    ANSWERED = "answered"
    """claim: the claim was answered before; its work is finished or was reassigned to another generator."""
    DRAINED = "drained"
    """claim: the run ends; no more prompts are issued. lease: the run ends; too few groups are left."""
    GROUPS = "groups"
    """lease: fewer than `mini_batch_size` groups are complete."""
    FILTERED = "filtered"
    """lease: hundreds of groups in a row were filtered, so no mini-batch is expected."""
    SLOT = "slot"
    """lease with `order: strict`: the next slots are not complete."""


class Wait(NamedTuple):
    """No result yet: what the caller waits for, and since when (monotonic seconds)."""

    reason: WaitReason
    detail: str
    since: float


class Receipt(NamedTuple):
    """A message (a step group) was accepted, now or before; valid once the journal's content at that time is synced."""

    duplicate: bool = False
    late: tuple[TrajectoryId, ...] = ()
    """Trajectories whose content in the message came too late: the group has ended, or a newer attempt has replaced the
    trajectory, or the group continues without it. The generator stops playing these trajectories. Empty if the whole
    message is a duplicate."""
    wanted: int = 1
    """This generator's share of the complete groups that the next mini-batch still lacks; the generator sends a message
    at once when the message completes this many groups."""
