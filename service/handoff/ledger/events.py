"""Everything that can happen to the buffer, as typed events.

The buffer decides, the journal stores the event, the ledger applies it; the same events applied again give the same
ledger. The journal stores an accepted step group as its wire bytes, from which `StepsAccepted` is derived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from service.handoff.prefixes.sharing import Chain
from service.types import PolicyVersion, Sender, TrajectoryEnd

EVENT = 1
"""Journal kind of an encoded event."""
STEPS = 2
"""Journal kind of a step group's wire bytes."""
SNAPSHOT = 3
"""Journal kind of the ledger's whole state; frames before it are needed only for the steps of its groups."""


class Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The root of the events."""


class Opened(Event, frozen=True):
    """A run began, with the settings that must not change while its journal is used."""

    seed: int
    prompts_digest: int
    n_samples: int
    mini_batch_size: int


class Joined(Event, frozen=True):
    """A new incarnation of a generator or of the trainer; its older ones are fenced."""

    role: str
    name: str
    incarnation: int
    step: int = 0
    """Of a trainer: the optimizer step that it goes on from; groups that were trained after it are leased again."""


class Left(Event, frozen=True):
    """A generator ended."""

    generator: str
    incarnation: int
    reason: str


class Issued(Event, frozen=True):
    """The next group_id went to a generator whose engine served `admitted`."""

    group_id: int
    row: int
    uid: str
    generator: str
    incarnation: int
    admitted: PolicyVersion
    request_id: int = 0
    """The id of the claim that it answers; 0: the claim had none."""


class Assigned(Event, frozen=True):
    """Restarted trajectories of a group went to a generator."""

    group_id: int
    samples: tuple[int, ...]
    generator: str
    incarnation: int
    request_id: int = 0


class Restarted(Event, frozen=True):
    """Trajectories of a group start anew as their next attempts; their steps so far are superseded."""

    group_id: int
    samples: tuple[int, ...]
    reason: str


class Filtered(Event, frozen=True):
    """A filter removed a complete group; the group vacates its slot."""

    group_id: int
    reason: str
    trajectories: int
    reward_sum: float
    passed: bool


class Truncated(Event, frozen=True):
    """A group goes on without samples that were unfinished at its deadline, or whose last attempts failed."""

    group_id: int
    samples: tuple[int, ...]
    reason: str = "group_deadline"


class Refused(Event, frozen=True):
    """A group is given up because of a fault; the group vacates its slot."""

    group_id: int
    reason: str


class Expired(Event, frozen=True):
    """A group ends untrained and without a fault; the group vacates its slot."""

    group_id: int
    reason: str


class Leased(Event, frozen=True):
    """Groups were leased to the trainer as a mini-batch, with their tokens by fate."""

    lease: int
    trainer_incarnation: int
    group_ids: tuple[int, ...]
    loss_tokens: tuple[tuple[int, ...], ...]
    """Of each group, by sample: tokens that carry loss."""
    stale_tokens: tuple[int, ...]
    """Of each group: tokens that are too stale to carry loss."""


class Committed(Event, frozen=True):
    """The optimizer step of a lease was applied and made `version`."""

    lease: int
    version: PolicyVersion
    final: bool = False
    """Whether the step cannot be undone, because no checkpoints are written."""


class Released(Event, frozen=True):
    """The trainer or a deadline gave a lease back."""

    lease: int
    reason: str


class Covered(Event, frozen=True):
    """A durable checkpoint covers the optimizer steps up to `step`; checkpoints before `oldest_kept` were removed."""

    step: int
    oldest_kept: int


class Drained(Event, frozen=True):
    """No more prompts are issued; or, without a reason, prompts are issued again."""

    reason: str | None


class Addition(NamedTuple):
    """What a message adds to one trajectory."""

    group_id: int
    sample: int
    items: tuple[int, ...]
    """Positions in the message of the steps that are new, by step index."""
    indices: tuple[int, ...]
    """Their step indices."""
    tokens: int
    """Their tokens that the policy sampled."""
    bad_tokens: int
    """Their sampled tokens whose log-probability is not a finite number."""
    n_bytes: int
    """Bytes that the steps and the end are counted with."""
    end: TrajectoryEnd | None
    """The trajectory's end, if it is new."""
    chain: Chain | None
    """The trajectory's chain with the new steps; None if its steps branch or have gaps, or if it is complete."""


class StepsAccepted(NamedTuple):
    """A step group was accepted; derived from its wire bytes."""

    sender: Sender
    additions: Sequence[Addition]
    position: int
    """The position to which the journal has to be synced."""
    routing: tuple[int, ...] | None = None
    """(layers, topk) of the routed experts; None without any."""


GroupEnd = Filtered | Refused | Expired
"""A group ends without having been trained."""

Journalled = (
    Opened
    | Joined
    | Left
    | Issued
    | Assigned
    | Restarted
    | Filtered
    | Truncated
    | Refused
    | Expired
    | Leased
    | Committed
    | Released
    | Covered
    | Drained
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Journalled] = msgspec.msgpack.Decoder(Journalled)


def encode(event: Journalled) -> bytes:
    """The bytes of an event in the journal."""
    return _encoder.encode(event)


def decode(payload: bytes) -> Journalled:
    """The event of these bytes.

    Raises:
        msgspec.ValidationError: they are none.
    """
    return _decoder.decode(payload)
