"""The states of a group, the fates of its tokens, and all events of the buffer, as types.

ISSUED -> OPEN -> SCORING -> COMPLETE -> LEASED -> STEPPED -> TRAINED
                                ^  |        |         |          |
                                |  |        +-> release          |
                                +--|-----------  rollback  ------+
                                   +-> FILTERED          and from ISSUED to COMPLETE: REFUSED, EXPIRED

Groups without scorers go from OPEN to COMPLETE. The buffer makes an event, the journal stores it, the ledger applies
it; of an accepted step group the journal stores the wire bytes, from which its `Addition`s are derived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from enum import StrEnum
from functools import reduce
from operator import add, or_
from typing import NamedTuple

import msgspec

from service.handoff.group_bytes import REWARD_BYTES, SCORE_BYTES
from service.types import PolicyVersion, TrajectoryEnd


class GroupState(StrEnum):
    """The state of a group in its lifecycle."""

    ISSUED = "issued"
    """A generator claimed the group; no step or end record of the group was accepted yet."""
    OPEN = "open"
    """A step or an end record of the group was accepted; not all trajectories are complete."""
    SCORING = "scoring"
    """All trajectories are complete; at least one scorer has not answered yet."""
    COMPLETE = "complete"
    """The group may be leased."""
    LEASED = "leased"
    STEPPED = "stepped"
    """An optimizer step used the group; no durable checkpoint covers that step yet."""
    TRAINED = "trained"
    FILTERED = "filtered"
    REFUSED = "refused"
    EXPIRED = "expired"


_ENDS = (GroupState.REFUSED, GroupState.EXPIRED)
NEXT_STATES: dict[GroupState, tuple[GroupState, ...]] = {
    GroupState.ISSUED: (GroupState.OPEN, GroupState.SCORING, GroupState.COMPLETE, *_ENDS),
    GroupState.OPEN: (GroupState.SCORING, GroupState.COMPLETE, *_ENDS),
    GroupState.SCORING: (GroupState.COMPLETE, *_ENDS),
    GroupState.COMPLETE: (GroupState.LEASED, GroupState.FILTERED, *_ENDS),
    GroupState.LEASED: (GroupState.COMPLETE, GroupState.STEPPED),
    GroupState.STEPPED: (GroupState.TRAINED, GroupState.COMPLETE),
    GroupState.TRAINED: (GroupState.COMPLETE,),
}
UNFINISHED = (GroupState.ISSUED, GroupState.OPEN)
USED = (GroupState.STEPPED, GroupState.TRAINED)


class Fate(StrEnum):
    """The fate of a token that the policy sampled and the buffer accepted; every token has exactly one."""

    OPEN = "open"
    """The token's group is unfinished, waits to be leased, or is leased."""
    STEPPED = "stepped"
    """The token carried loss in an optimizer step that no durable checkpoint covers yet."""
    TRAINED = "trained"
    """The token carried loss in an optimizer step that a durable checkpoint covers."""
    STALE = "stale"
    """The token was older than `max_staleness` when its group was trained, so it carried no loss."""
    MASKED = "masked"
    """The token carried no loss for another reason than staleness, such as a log-probability that is not finite."""
    SUB = "sub"
    """The token is from a sub-agent, whose role is not trained (`agents.train`)."""
    AUX = "aux"
    """The token is from a single question outside an agent's conversation, whose role is not trained."""
    RETRY = "retry"
    """The token is from a response that a later response to the same request replaced."""
    UNDELIVERED = "undelivered"
    """The token is from a response that no client received."""
    JUDGE = "judge"
    """The token is from a role that the policy plays without being trained on it (`roles`)."""
    FILTERED = "filtered"
    REFUSED = "refused"
    EXPIRED = "expired"
    """The token's group expired, or continued without the token's trajectory."""
    SUPERSEDED = "superseded"
    """A newer attempt of the trajectory replaced the token's attempt."""
    ROLLED_BACK = "rolled_back"
    """The optimizer step that used the token was undone, and its group waits to be trained again."""


GIVEN_UP = -1
"""Number of the attempt of a sample that was given up: its group continues without the sample."""


# Kinds of journal frames.
EVENT = 1  # an encoded event
STEPS = 2  # an accepted message: a step group's wire bytes
SNAPSHOT = 3  # the ledger's whole state; frames before it are needed only for steps of its groups
COPIED = 4  # as STEPS, copied from an older part of the journal
SCORES = 5  # an encoded `Scored` event, which may occur twice because it is copied like steps


class Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base class of the buffer's events."""


class Opened(Event, frozen=True):
    """A run began, with the settings that must not change while its journal is used."""

    rows: str
    """Digest of the dataset's rows, their order included."""
    settings: dict[str, int]
    """The settings, by name, that determine the meaning of group_ids, slots and rows."""


class Joined(Event, frozen=True):
    """A new incarnation of a generator or of the trainer; calls of older incarnations are refused from now on."""

    role: str
    name: str
    incarnation: int
    step: int = 0
    """For a trainer: the optimizer step from which it continues; groups of later optimizer steps are leased again."""
    resumes: bool = False
    """For a generator: whether its unfinished trajectories move to another generator when it leaves."""


class Left(Event, frozen=True):
    """A generator left the run."""

    generator: str
    incarnation: int
    reason: str


class Issued(Event, frozen=True):
    """A new group was given to a generator; `admitted`: the policy version that the generator's engine served."""

    group_id: int
    row: int
    uid: str
    generator: str
    incarnation: int
    admitted: PolicyVersion
    request_id: int = 0
    """The id of the answered claim; 0: the claim had none."""
    place: int | None = None
    """The row's place in the order of issue; None: the place is the group_id."""
    scorers: tuple[str, ...] = ()
    """Names of the scorers that have to answer before the group may be leased."""


class Scored(Event, frozen=True):
    """A scorer's answer about a group; only its first answer counts."""

    group_id: int
    scorer: str
    rewards: tuple[float, ...] | None = None
    """[G] the weighted reward of each trajectory, by sample; NaN: the group continues without it. None: no rewards."""
    replaces: bool = False
    """True if the rewards replace the environment's rewards; False if they are added to them."""
    info: tuple[str, ...] = ()
    """[G] the scorer's text about each trajectory; empty: no texts."""
    teacher: bytes = b""
    """The teacher's log-probabilities of `scores.sampled_tokens`, as little-endian float32; empty: none."""
    fallback: str = ""
    """The reason why the group continues without an answer of the scorer; empty if there is an answer."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the answer, as `service.handoff.group_bytes` counts them."""
        texts = sum(len(text.encode()) for text in self.info)
        return SCORE_BYTES + REWARD_BYTES * len(self.rewards or ()) + len(self.teacher) + texts


class Tried(Event, frozen=True):
    """A group became complete, and this many of its trajectories succeeded; the curriculum uses these numbers."""

    group_id: int
    successes: int
    trajectories: int


class Assigned(Event, frozen=True):
    """Restarted trajectories of a group were given to a generator."""

    group_id: int
    samples: tuple[int, ...]
    generator: str
    incarnation: int
    request_id: int = 0


class Moved(Event, frozen=True):
    """Unfinished trajectories of a group have lost their generator; the next generator continues them."""

    group_id: int
    samples: tuple[int, ...]
    died: bool = True
    """Whether the generator died, perhaps because of these trajectories."""


class Restarted(Event, frozen=True):
    """Trajectories of a group restart as new attempts; the steps of their old attempts are superseded."""

    group_id: int
    samples: tuple[int, ...]
    reason: str


class GivenUp(Event, frozen=True, tag="Truncated"):
    """A group continues without trajectories that were unfinished at its deadline, or whose last attempts failed."""

    group_id: int
    samples: tuple[int, ...]
    reason: str = "group_deadline"


@dataclass(slots=True)
class GroupStats:
    """Counts and sums of the returns of groups; filtered groups count in the metrics of the next mini-batch."""

    groups: int = 0
    trajectories: int = 0
    return_sum: float = 0.0
    passed: int = 0
    """Number of groups with a positive return."""
    flat: int = 0
    """Number of groups without variance: all returns are equal."""
    zeros: int = 0
    """Number of groups in which every return is 0."""
    ones: int = 0
    """Number of groups in which every return is 1."""
    tokens: int = 0
    """Number of sampled tokens in groups that filters removed."""

    def __add__(self, other: GroupStats) -> GroupStats:
        return GroupStats(*map(add, astuple(self), astuple(other)))


class Ended(Event, frozen=True):
    """A group ended without being trained; its slot is free for another group."""

    group_id: int
    state: GroupState
    """FILTERED by a filter, REFUSED because of an error, or EXPIRED at a deadline or at the end of the run."""
    reason: str
    filtered: GroupStats | None = None


class Leased(Event, frozen=True):
    """Groups were leased to the trainer as a mini-batch, with the numbers of tokens that will get each fate."""

    lease: int
    trainer_incarnation: int
    group_ids: tuple[int, ...]
    loss_tokens: tuple[tuple[int, ...], ...]
    """For each group, the number of tokens that carry loss, by sample."""
    stale_tokens: tuple[int, ...]
    """For each group, the number of tokens that are too stale to carry loss."""
    untrained_tokens: tuple[dict[Fate, int], ...]
    """For each group, the number of tokens in steps whose role is not trained, by fate."""


class Committed(Event, frozen=True):
    """The optimizer step of a lease was applied and made policy version `version`."""

    lease: int
    version: PolicyVersion
    final: bool = False
    """Whether the step cannot be undone, because no checkpoints are written."""


class Released(Event, frozen=True):
    """A lease was released, by a trainer or at its deadline."""

    lease: int
    reason: str


class Covered(Event, frozen=True):
    """A durable checkpoint covers the optimizer steps up to `step`; checkpoints before `oldest_kept` were removed."""

    step: int
    oldest_kept: int


class Drained(Event, frozen=True):
    """The buffer stops issuing prompts or, if `reason` is None, issues prompts again."""

    reason: str | None


class Addition(NamedTuple):
    """The new content that a message adds to one trajectory."""

    group_id: int
    sample: int
    items: tuple[int, ...]
    """Positions of the new steps in the message, ordered by step index."""
    indices: tuple[int, ...]
    """Step indices of the new steps."""
    tokens: int
    """Number of sampled tokens in the new steps."""
    bad_tokens: int
    """Number of sampled tokens in the new steps whose log-probability is not a finite number."""
    n_bytes: int
    end: TrajectoryEnd | None
    """The end record of the trajectory, if the message contains it and it is new."""


encode: Callable[[Event], bytes] = msgspec.msgpack.Encoder().encode
"""The bytes of an event, as written to the journal."""
decode: Callable[[bytes], Event] = msgspec.msgpack.Decoder(reduce(or_, Event.__subclasses__())).decode
"""The event with these bytes; raises a msgspec.ValidationError if the bytes are malformed."""
scored_from: Callable[[bytes], Scored] = msgspec.msgpack.Decoder(Scored).decode
"""A scorer's answer with these bytes; raises a msgspec.ValidationError if the bytes are malformed."""
