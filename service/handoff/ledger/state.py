"""The state that the events determine: groups, trajectories, generators, leases, counts.

Only the ledger changes this state, except `Group.first_position`, which the record sets. The whole state is written
into the journal's snapshots and read back from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import accumulate

from service.handoff.ledger.events import GroupStats, Opened
from service.handoff.ledger.lifecycle import Fate, GroupState
from service.types import PolicyVersion

MESSAGES_REMEMBERED = 256
"""Maximum number of out-of-order sequence numbers that are remembered per generator."""

CLAIMS_REMEMBERED = 64
"""Answered claims that are remembered per generator, because Ray repeats a claim whose answer was lost. A generator has
one or two open claims at a time."""

BUCKETS = 33

NEWEST_GROUPS = 4
"""A prompt's success is about the mean over this number of its newest groups."""


@dataclass(slots=True)
class Trajectory:
    """The current attempt of one sample of a group."""

    generator: str | None
    """The generator that plays the trajectory; None while the trajectory waits for a claim."""
    incarnation: int
    attempt: int = 0
    indices: set[int] = field(default_factory=set)
    """Indices of the accepted steps."""
    n_steps: int | None = None
    """Number of steps of the whole trajectory; None until its end was accepted."""
    tokens: int = 0
    """Sampled tokens."""
    bad_tokens: int = 0
    """Sampled tokens whose log-probability is not a finite number."""
    n_bytes: int = 0
    """Bytes of the accepted steps and end, as `service.handoff.group_bytes` counts them."""
    given_up: bool = False
    """Whether the group continues without the trajectory."""
    moves: int = 0
    """Number of generators that the trajectory lost since its last step was accepted."""

    @property
    def complete(self) -> bool:
        """Whether the trajectory's end and all its steps were accepted, or it was given up."""
        return self.given_up or (self.n_steps is not None and len(self.indices) == self.n_steps)


@dataclass(slots=True)
class Group:
    """The trajectories of one `group_id`."""

    uid: str
    row: int
    admitted: PolicyVersion
    """The version that the claiming generator's engine served; no sample starts on an older version."""
    trajectories: list[Trajectory]
    """The trajectories, by sample; empty once an optimizer step used the group."""
    attempts: tuple[int, ...] = ()
    """The completed attempt of each sample, once all are complete; GIVEN_UP for a sample that was given up."""
    state: GroupState = GroupState.ISSUED
    first_position: int | None = None
    """Journal position of the frame with the group's first step or end; None before that."""
    finished: int = 0
    """The group's number in the order of completion."""
    lease_count: int = 0
    rolled_back: bool = False
    """Whether the optimizer step that used the group was undone."""
    step: int = 0
    """The optimizer step that used the group, once the group is STEPPED."""
    tokens: int = 0
    """Sampled tokens of all current attempts."""
    n_bytes: int = 0
    lengths: tuple[int, ...] = ()
    """Number of sampled tokens of each trained trajectory."""
    losses: tuple[int, ...] = ()
    """Number of tokens that carry loss, for each trained trajectory."""
    stale_tokens: int = 0
    untrained: dict[Fate, int] = field(default_factory=dict)
    """Tokens whose steps have roles that are not trained, by fate."""
    tried: bool = False
    """Whether the group counts in its prompt's success."""
    scorers: tuple[str, ...] = ()
    """Scorers that have to answer before the group may be leased."""
    scored: tuple[str, ...] = ()
    """Scorers that have answered, or whose answer is no longer waited for."""
    unrewarded: set[int] = field(default_factory=set)
    """Samples to which a scorer gave no reward: the group continues without them once all scorers have answered."""

    @property
    def awaited(self) -> tuple[str, ...]:
        """The scorers that have not answered yet."""
        return tuple(name for name in self.scorers if name not in self.scored)

    @property
    def waiting_fate(self) -> Fate:
        """The fate of the group's tokens while no optimizer step uses the group."""
        return Fate.ROLLED_BACK if self.rolled_back else Fate.OPEN

    @property
    def loss_tokens(self) -> int:
        return sum(self.losses)


@dataclass(slots=True)
class Member:
    """A generator that has joined."""

    incarnation: int
    alive: bool = True
    received_below: int = 0
    """Every message with a smaller sequence number was received."""
    received: set[int] = field(default_factory=set)
    """Further sequence numbers that were received; only the newest are kept, because a message that had
    nothing new or was refused leaves a gap for ever."""
    given: dict[int, tuple[int, dict[int, int]]] = field(default_factory=dict)
    """For each of the generator's newest claims, by request_id: the assigned group_id and each sample's attempt."""

    def note_given(self, request_id: int, group_id: int, attempts: dict[int, int]) -> None:
        """Remember the work that a claim got; claims without a request_id (0) are not remembered."""
        if request_id:
            self.given[request_id] = (group_id, attempts)
            if len(self.given) > CLAIMS_REMEMBERED:
                del self.given[min(self.given)]


@dataclass(slots=True)
class Lease:
    """A lease: the groups that the trainer holds."""

    trainer_incarnation: int
    group_ids: tuple[int, ...]
    filtered: GroupStats


def _zeros() -> list[int]:
    return [0] * BUCKETS


@dataclass(slots=True)
class Lengths:
    """Histograms of the lengths of generated and of trained trajectories: the two differ if long trajectories are lost.

    A trajectory of n sampled tokens counts in bucket `n.bit_length()`: 0 | 1 | 2 3 | 4 .. 7 | 8 .. 15 | ..
    """

    generated: list[int] = field(default_factory=_zeros)
    """Trajectories that were completed."""
    trained: list[int] = field(default_factory=_zeros)
    """Trajectories that an optimizer step used."""
    given_up: list[int] = field(default_factory=_zeros)
    """Trajectories without which their group continued."""
    generated_tokens: list[int] = field(default_factory=_zeros)
    """Sampled tokens of the generated trajectories."""
    loss_tokens: list[int] = field(default_factory=_zeros)
    """Tokens of the trained trajectories that carried loss."""

    def export(self) -> dict[str, list[int]]:
        """The counts by name, without the empty buckets at the end: `[5, 1, 2]`: 5 of length 0, 1 of 1, 2 of 2 or 3."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        used = max((place + 1 for of in counts.values() for place, count in enumerate(of) if count), default=0)
        return {name: of[:used] for name, of in counts.items()}


def bucket(tokens: int) -> int:
    """The bucket of `Lengths` in which a trajectory of `tokens` tokens counts."""
    return min(tokens.bit_length(), BUCKETS - 1)


def distance(a: list[int], b: list[int]) -> float:
    """Largest difference between the cumulative distributions of two histograms, 0 (equal) to 1; 0 if one is empty.

    >>> distance([1, 1, 2], [0, 1, 1])
    0.25
    """
    if not sum(a) or not sum(b):
        return 0.0
    below = zip(accumulate(a), accumulate(b), strict=True)
    return max(abs(x / sum(a) - y / sum(b)) for x, y in below)


@dataclass(slots=True)
class Success:
    """The success of a prompt's groups so far."""

    groups: int = 0
    success: float = 0.0
    """Fraction of trajectories that succeeded: a running mean over groups, in which each new group has a weight of at
    least 1 / `NEWEST_GROUPS`, so that results of older policies fade."""

    def note(self, success: float) -> None:
        """Add the success of one more group."""
        self.groups += 1
        self.success += (success - self.success) / min(self.groups, NEWEST_GROUPS)


@dataclass(slots=True)
class State:
    """The whole state, as stored in the journal's snapshots."""

    n_samples: int
    opened: Opened | None = None
    groups: dict[int, Group] = field(default_factory=dict)
    """All groups that may still change, by group_id."""
    next_group_id: int = 0
    vacated: int = 0
    """Groups that ended untrained and freed their slot."""
    generators: dict[str, Member] = field(default_factory=dict)
    trainer_incarnation: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    next_lease: int = 1
    last_commit: int = 0
    """The lease of the newest optimizer step."""
    step: int = 0
    branches: list[tuple[int, int]] = field(default_factory=list)
    """For each trainer that joined: the step that had been reached, and the step from which the trainer continued."""
    covered: int = 0
    """The newest step that a durable checkpoint covers."""
    finals: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(groups, loss tokens) of optimizer steps that cannot be undone and that no checkpoint covers yet."""
    next_finished: int = 1
    filtered: GroupStats = field(default_factory=GroupStats)
    lengths: Lengths = field(default_factory=Lengths)
    accepted: int = 0
    """Sampled tokens that were accepted."""
    fates: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(Fate, 0))
    """The accepted tokens by fate."""
    ended: dict[str, int] = field(default_factory=dict)
    """Groups that ended, by `state/reason`."""
    restarts: dict[str, int] = field(default_factory=dict)
    """Trajectories that started anew, by reason."""
    given_up: dict[str, int] = field(default_factory=dict)
    """Trajectories without which their group continued, by reason."""
    moved: int = 0
    """Trajectories that lost their generator and continued with their steps."""
    routing: tuple[int, ...] | None = None
    """(layers, topk) of all routed experts, as in the first accepted step that had some."""
    draining: str | None = None
    next_place: int = 0
    """The next place in the order in which prompts are issued."""
    successes: dict[int, Success] = field(default_factory=dict)
    """The success of each row's prompt so far; empty without a curriculum."""
    lost: dict[str, int] = field(default_factory=dict)
    """For each process, the tokens that it accepted and that no journal holds any more; they count as rolled back."""
