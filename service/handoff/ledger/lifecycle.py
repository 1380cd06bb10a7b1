"""The lives of groups and trajectories, as the ledger keeps them.

ISSUED -> OPEN -> COMPLETE -> LEASED -> STEPPED -> TRAINED
                     ^  |        |         |          |
                     |  |        +-> release          |
                     +--|-----------  rollback  ------+
                        +-> FILTERED          and from ISSUED, OPEN, COMPLETE: REFUSED, EXPIRED
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from service.types import PolicyVersion


class GroupState(StrEnum):
    """Where a group stands."""

    ISSUED = "issued"
    """Claimed; no step has come yet."""
    OPEN = "open"
    """Steps stream in."""
    COMPLETE = "complete"
    """All its trajectories ended and all their steps are here."""
    LEASED = "leased"
    STEPPED = "stepped"
    """An optimizer step used it; no durable checkpoint covers that step yet."""
    TRAINED = "trained"
    FILTERED = "filtered"
    REFUSED = "refused"
    EXPIRED = "expired"


_ENDS = (GroupState.REFUSED, GroupState.EXPIRED)
NEXT_STATES: dict[GroupState, tuple[GroupState, ...]] = {
    GroupState.ISSUED: (GroupState.OPEN, GroupState.COMPLETE, *_ENDS),
    GroupState.OPEN: (GroupState.COMPLETE, *_ENDS),
    GroupState.COMPLETE: (GroupState.LEASED, GroupState.FILTERED, *_ENDS),
    GroupState.LEASED: (GroupState.COMPLETE, GroupState.STEPPED),
    GroupState.STEPPED: (GroupState.TRAINED, GroupState.COMPLETE),
    GroupState.TRAINED: (GroupState.COMPLETE,),
    GroupState.FILTERED: (),
    GroupState.REFUSED: (),
    GroupState.EXPIRED: (),
}
VACATES = (GroupState.FILTERED, GroupState.REFUSED, GroupState.EXPIRED)
"""Ends that give the group's slot back, so that later groups move up."""
UNFINISHED = (GroupState.ISSUED, GroupState.OPEN)
USED = (GroupState.STEPPED, GroupState.TRAINED)


class Fate(StrEnum):
    """What became of a token that the policy sampled and the buffer accepted; every token has exactly one."""

    OPEN = "open"
    """Its group waits, is leased, or still grows."""
    STEPPED = "stepped"
    """It carried loss in an optimizer step that no checkpoint covers yet."""
    TRAINED = "trained"
    """It carried loss in an optimizer step that a durable checkpoint covers."""
    STALE = "stale"
    """It was older than `max_staleness` when it was trained, and carried no loss."""
    MASKED = "masked"
    """A rule other than staleness took its loss, such as a log-probability that was not finite."""
    FILTERED = "filtered"
    REFUSED = "refused"
    EXPIRED = "expired"
    """Its group expired, or went on without its trajectory."""
    SUPERSEDED = "superseded"
    """A newer attempt of its trajectory replaced it."""
    ROLLED_BACK = "rolled_back"
    """The optimizer step that used it was undone; its group waits to be trained again."""


GIVEN_UP = -1
"""Instead of an attempt: the sample takes no part."""


@dataclass(slots=True)
class Trajectory:
    """The current attempt of one sample of a group."""

    generator: str | None
    """Who generates it; None while it waits for a claim."""
    incarnation: int
    attempt: int = 0
    indices: set[int] = field(default_factory=set)
    """Steps that are here."""
    n_steps: int | None = None
    """How many it has; None until its end is here."""
    tokens: int = 0
    """Tokens that the policy sampled."""
    bad_tokens: int = 0
    """Of those, the ones whose log-probability is not a finite number."""
    n_bytes: int = 0
    """Bytes that its steps and its end are counted with, see `service.handoff.group_bytes`."""
    given_up: bool = False
    """Whether its group goes on without it."""

    @property
    def complete(self) -> bool:
        """Whether its end and all its steps are here, or nobody waits for them any more."""
        return self.given_up or (self.n_steps is not None and len(self.indices) == self.n_steps)


@dataclass(slots=True)
class Group:
    """One group_id's life."""

    uid: str
    row: int
    admitted: PolicyVersion
    """What the claiming engine served; no sample starts on anything older."""
    trajectories: list[Trajectory]
    """By sample; empty once the group was used."""
    attempts: tuple[int, ...] = ()
    """By sample the attempt that was completed, once all are; GIVEN_UP where the group goes on without it."""
    state: GroupState = GroupState.ISSUED
    first_position: int | None = None
    """Journal position of the frame with its first step or end; None while there is none."""
    finished: int = 0
    """Its place in the order of completion."""
    lease_count: int = 0
    """Leases it was part of."""
    rolled_back: bool = False
    step: int = 0
    """The optimizer step that used it, once it is STEPPED."""
    tokens: int = 0
    """Tokens of all current attempts."""
    lengths: tuple[int, ...] = ()
    """Of each trajectory that is trained: its tokens."""
    losses: tuple[int, ...] = ()
    """Of each trajectory that is trained: its tokens that carry loss."""
    stale_tokens: int = 0

    @property
    def waiting_fate(self) -> Fate:
        """The fate of its tokens while no optimizer step uses it."""
        return Fate.ROLLED_BACK if self.rolled_back else Fate.OPEN

    @property
    def loss_tokens(self) -> int:
        """Tokens that carry loss."""
        return sum(self.losses)

    @property
    def current_attempts(self) -> tuple[int, ...]:
        """By sample the attempt that counts; GIVEN_UP where none does."""
        return self.attempts or tuple(GIVEN_UP if t.given_up else t.attempt for t in self.trajectories)

    @property
    def masked_tokens(self) -> int:
        """Tokens that carried no loss for another reason than staleness."""
        return self.tokens - self.loss_tokens - self.stale_tokens


MESSAGES_REMEMBERED = 256
"""Messages behind a gap in a generator's numbers that are known by their number alone."""

CLAIMS_REMEMBERED = 64
"""A generator has one or two claims on their way at once; Ray repeats one whose answer was lost."""


@dataclass(slots=True)
class Member:
    """A generator as the buffer knows it."""

    incarnation: int
    alive: bool = True
    received_below: int = 0
    """Every message with a smaller sequence number was received."""
    received: set[int] = field(default_factory=set)
    """Further sequence numbers that were received; the newest ones, for a refused message leaves a gap for good."""
    position: int = 0
    """Where the journal has to be synced to for its last message."""
    given: dict[int, tuple[int, dict[int, int]]] = field(default_factory=dict)
    """What its newest claims got, by their numbers: the group_id, and the attempt of each sample."""

    def note_given(self, claim: int, group_id: int, attempts: dict[int, int]) -> None:
        """Remember what a numbered claim got."""
        if claim:
            self.given[claim] = (group_id, attempts)
            if len(self.given) > CLAIMS_REMEMBERED:
                del self.given[min(self.given)]

    def has(self, sequence: int) -> bool:
        """Whether that message was received; False also for one long ago, whose steps are then known one by one."""
        return sequence < self.received_below or sequence in self.received

    def note(self, sequence: int, position: int) -> None:
        """Remember that message."""
        self.received.add(sequence)
        while self.received_below in self.received:
            self.received.remove(self.received_below)
            self.received_below += 1
        if len(self.received) > MESSAGES_REMEMBERED:
            self.received.remove(min(self.received))
        self.position = position


@dataclass(slots=True)
class FilteredStats:
    """What filters removed since the last mini-batch; its rewards still count in the next one's metrics."""

    groups: int = 0
    trajectories: int = 0
    reward_sum: float = 0.0
    passed: int = 0

    def add(self, other: FilteredStats) -> None:
        """Count the other's groups too."""
        self.groups += other.groups
        self.trajectories += other.trajectories
        self.reward_sum += other.reward_sum
        self.passed += other.passed


@dataclass(slots=True)
class Lease:
    """Groups that the trainer holds."""

    trainer_incarnation: int
    group_ids: tuple[int, ...]
    filtered: FilteredStats
