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
    """Work for a generator: trajectories of one group, with the number of each in the group (`samples`) and the number
    of its attempt."""

    group_id: int
    prompt_uid: str
    row: int
    """The prompt's row in the dataset."""
    samples: tuple[int, ...]
    attempts: tuple[int, ...]
    steps: tuple[bytes, ...] = ()
    """The accepted steps of each sample, encoded as a message; the generator continues after these steps. Empty bytes
    for a sample without steps; () if no sample of the group has steps."""

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
    DRAINED = "drained"
    """The run ends: a claim gets no more work, or too few groups are left for a lease."""
    GROUPS = "groups"
    """A lease waits: fewer than `mini_batch_size` groups are complete."""
    FILTERED = "filtered"
    """A lease waits: hundreds of groups in a row were filtered, so no mini-batch is expected."""
    SLOT = "slot"
    """A lease with `order: strict` waits: the groups that are next in order are not complete."""


class Wait(NamedTuple):
    """The answer to a claim or a lease that has to wait: the kind of reason, the reason in words, and the monotonic
    time in seconds at which the wait for this reason began."""

    reason: WaitReason
    detail: str
    since: float


class Receipt(NamedTuple):
    """The answer to a message (a step group) that was accepted now or before. The receipt is valid once everything that
    the journal had when the receipt was made is on the disk."""

    duplicate: bool = False
    late: tuple[TrajectoryId, ...] = ()
    """Trajectories whose content in the message came too late: the group has ended, or a newer attempt has replaced the
    trajectory, or the group continues without it. The generator stops playing these trajectories. Empty if the whole
    message is a duplicate."""
    wanted: int = 1
    """This generator's share of the complete groups that the next mini-batch still lacks. The generator sends a message
    at once if the message completes this many groups."""
