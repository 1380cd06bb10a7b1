"""The state that the events determine: groups, trajectories, generators, leases, counts; and the published versions.

The whole state is written into the journal's snapshots and read back from them.

published:  (0,0) (0,1) (0,2) (0,3)      then the trainer goes back to step 1 as incarnation 1
                     \\__ (1,1) (1,2)
staleness at (1,2):  of a (0,1) token 1; of (1,2) 0; of an abandoned (0,3) token 1, of an abandoned (0,2) token 1

The trainer repeats the undone steps on the same groups, so the weights of an abandoned version are close to those of
the repeated version of the same step. The staleness of its tokens is |step - trainer's step|, and at least 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import accumulate

import numpy as np

from service.columns import changes
from service.handoff.ledger.events import Fate, GroupState, GroupStats, Opened
from service.types import NO_VERSION, Bools, Int32s, Int64s, PolicyVersion

MESSAGES_REMEMBERED = 256
"""Maximum number of sequence numbers that are remembered per generator for messages received out of order."""

CLAIMS_REMEMBERED = 64
"""Answered claims that are remembered per generator, because Ray repeats a claim whose answer was lost."""

BUCKETS = 33

NEWEST_GROUPS = 4
"""A prompt's success is approximately the mean over this number of the prompt's newest groups."""


@dataclass(slots=True)
class Attempt:
    """The current attempt at one trajectory of a group."""

    generator: str | None
    """The generator that plays the trajectory; None while the trajectory waits for a claim."""
    incarnation: int
    attempt: int = 0
    indices: set[int] = field(default_factory=set)
    """Indices of the accepted steps."""
    n_steps: int | None = None
    """Number of steps of the whole trajectory; None until the end record was accepted."""
    tokens: int = 0
    """Number of sampled tokens."""
    bad_tokens: int = 0
    """Number of sampled tokens whose log-probability is not a finite number."""
    n_bytes: int = 0
    """Bytes of the accepted steps and end record, as `service.handoff.group_bytes` counts them."""
    given_up: bool = False
    """Whether the group continues without the trajectory."""
    moved: bool = False
    """Whether another generator began the attempt."""
    deaths: int = 0
    """Number of generators that may have died of the attempt, since its last step was accepted."""

    @property
    def failures(self) -> int:
        """Number of attempts that have failed, counting each of the `deaths` as one."""
        return self.attempt + self.deaths

    @property
    def complete(self) -> bool:
        """Whether the end record and all steps of the trajectory were accepted, or the group continues without it."""
        return self.given_up or (self.n_steps is not None and len(self.indices) == self.n_steps)


@dataclass(slots=True)
class Group:
    """The trajectories of one `group_id`."""

    uid: str
    row: int
    admitted: PolicyVersion
    """The version that the claiming generator's engine served; no sample starts on an older version."""
    trajectories: list[Attempt]
    """The trajectories, by sample; empty once an optimizer step used the group."""
    attempts: tuple[int, ...] = ()
    """The final attempt of each sample, once all samples are complete; GIVEN_UP for a sample that was given up."""
    state: GroupState = GroupState.ISSUED
    first_position: int | None = None
    """Journal position of the frame with the group's first step or end record; None before there is such a frame."""
    finished: int = 0
    """The number of the group in the order in which groups became complete."""
    lease_count: int = 0
    rolled_back: bool = False
    """Whether the optimizer step that used the group was undone."""
    step: int = 0
    """The optimizer step that used the group; 0 while no optimizer step uses the group."""
    tokens: int = 0
    """Number of sampled tokens of all current attempts."""
    n_bytes: int = 0
    lengths: tuple[int, ...] = ()
    """Number of sampled tokens of each trained trajectory."""
    losses: tuple[int, ...] = ()
    """Number of tokens that carry loss, for each trained trajectory."""
    stale_tokens: int = 0
    untrained: dict[Fate, int] = field(default_factory=dict)
    """Number of tokens in steps whose roles are not trained, by fate."""
    tried: bool = False
    """Whether the success of the group's prompt already includes the group."""
    scorers: tuple[str, ...] = ()
    """Names of the scorers that have to answer before the group may be leased."""
    scored: tuple[str, ...] = ()
    """Names of the scorers that have answered, or whose answer is no longer waited for."""
    unrewarded: set[int] = field(default_factory=set)
    """Samples to which a scorer gave no reward: the group continues without them once all scorers have answered."""

    @property
    def awaited(self) -> tuple[str, ...]:
        """Names of the scorers that have not answered yet."""
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
    resumes: bool = False
    """Whether its unfinished trajectories move to another generator when it leaves."""
    received_below: int = 0
    """Every message with a smaller sequence number was received."""
    received: set[int] = field(default_factory=set)
    """The newest sequence numbers received above `received_below`; a refused message leaves a gap for ever."""
    given: dict[int, tuple[int, dict[int, int]]] = field(default_factory=dict)
    """For each of the generator's newest claims, by request_id: the assigned group_id and each sample's attempt."""

    def note_given(self, request_id: int, group_id: int, attempts: dict[int, int]) -> None:
        """Remember the work that a claim got; a claim without a request_id (0) is not remembered."""
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
    """Histograms of the lengths of generated and of trained trajectories; they differ if long trajectories are lost.

    A trajectory of n sampled tokens counts in bucket `n.bit_length()`: 0 | 1 | 2 3 | 4 .. 7 | 8 .. 15 | ..
    """

    generated: list[int] = field(default_factory=_zeros)
    """Number of complete trajectories, by length. Then the same for trajectories that were trained, and for those that
    were given up."""
    trained: list[int] = field(default_factory=_zeros)
    given_up: list[int] = field(default_factory=_zeros)
    generated_tokens: list[int] = field(default_factory=_zeros)
    """Number of sampled tokens in the generated trajectories, by trajectory length."""
    loss_tokens: list[int] = field(default_factory=_zeros)
    """Number of tokens with loss in the trained trajectories, by trajectory length."""

    def export(self) -> dict[str, list[int]]:
        """The histograms by name, without empty buckets at the end."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        used = max((place + 1 for of in counts.values() for place, count in enumerate(of) if count), default=0)
        return {name: of[:used] for name, of in counts.items()}


def bucket(tokens: int) -> int:
    """The number of the bucket of `Lengths` in which a trajectory of `tokens` sampled tokens counts."""
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
    """Fraction of trajectories that succeeded: a running mean over about the `NEWEST_GROUPS` newest groups."""

    def note(self, success: float) -> None:
        """Add one more group, of whose trajectories this fraction succeeded."""
        self.groups += 1
        self.success += (success - self.success) / min(self.groups, NEWEST_GROUPS)


@dataclass(slots=True)
class State:
    """The whole state of the ledger, as stored in the journal's snapshots."""

    n_samples: int
    opened: Opened | None = None
    groups: dict[int, Group] = field(default_factory=dict)
    """All groups that may still change, by group_id."""
    next_group_id: int = 0
    vacated: int = 0
    """Number of groups that ended untrained and freed their slot."""
    generators: dict[str, Member] = field(default_factory=dict)
    trainer_incarnation: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    next_lease: int = 1
    last_commit: int = 0
    """The number of the lease whose optimizer step was applied last."""
    step: int = 0
    branches: list[tuple[int, int]] = field(default_factory=list)
    """For each trainer that joined: (the newest step at that time, the step from which the trainer continued)."""
    covered: int = 0
    """The newest step that a durable checkpoint covers."""
    finals: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(group count, loss tokens) by optimizer step, for steps that cannot be undone and no checkpoint covers yet."""
    next_finished: int = 1
    filtered: GroupStats = field(default_factory=GroupStats)
    lengths: Lengths = field(default_factory=Lengths)
    accepted: int = 0
    """Number of sampled tokens that were accepted."""
    fates: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(Fate, 0))
    """Number of accepted tokens by fate."""
    ended: dict[str, int] = field(default_factory=dict)
    """Number of groups that ended untrained, by `state/reason`."""
    restarts: dict[str, int] = field(default_factory=dict)
    """Number of trajectories that were restarted as a new attempt, by reason."""
    given_up: dict[str, int] = field(default_factory=dict)
    """Number of trajectories without which their group continued, by reason."""
    routing: tuple[int, ...] | None = None
    """(layers, topk) of every step's routed experts, as in the first accepted step that had any."""
    draining: str | None = None
    next_place: int = 0
    """The next place in the order in which prompts are issued."""
    successes: dict[int, Success] = field(default_factory=dict)
    """The success so far of each dataset row's prompt; empty without a curriculum."""


class VersionHistory:
    """All published versions, and the steps from which each new trainer incarnation continued."""

    def __init__(self, start: PolicyVersion | None = None) -> None:
        self.published: dict[int, PolicyVersion] = {}
        """Every published version, oldest first, by its packed number, which tokens carry."""
        self._branches: list[tuple[int, int]] = []  # (the incarnation that began, the step that it went back to)
        self._note(start or PolicyVersion(0, 0))

    def publish(self, version: PolicyVersion) -> None:
        """Add a published version; raises a ValueError if `version` is not newer than the current version."""
        if version <= self.current:
            raise ValueError(f"version {version} does not follow {self.current}")
        self._note(version)

    def rollback(self, to_step: int) -> int:
        """A new incarnation of the trainer continues from the step `to_step`; returns the incarnation's number."""
        if to_step > self.current.step:
            raise ValueError(f"cannot go back to step {to_step} from {self.current}")
        incarnation = self.current.incarnation + 1
        self._branches.append((incarnation, to_step))
        self._note(PolicyVersion(incarnation, to_step))
        return incarnation

    def known(self, versions_N: Int64s) -> Bools:
        """[N] whether each token's version was published."""
        heads = np.flatnonzero(changes(versions_N))  # equal versions are adjacent
        known_H = np.array([number in self.published for number in versions_N[heads].tolist()], np.bool_)
        return np.repeat(known_H, np.diff(np.append(heads, len(versions_N))))

    def staleness(self, versions_N: Int64s, at: PolicyVersion) -> Int32s:
        """[N] the staleness of each token at version `at`, in optimizer steps; -1 for tokens that no policy sampled."""
        step_N = np.ascontiguousarray(versions_N, "<i8").view("<i4")[::2]  # the low half; -1 for NO_VERSION
        stale_N = np.int32(at.step) - step_N
        for incarnation, common in self._branches:
            if incarnation <= at.incarnation:
                abandoned_N = (versions_N < incarnation << 32) & (step_N > common)
                stale_N = np.where(abandoned_N, np.maximum(np.abs(stale_N), 1), stale_N)
        stale_N |= step_N >> 31  # -1 where the step is negative, else unchanged
        return stale_N

    def _note(self, version: PolicyVersion) -> None:
        self.current = version
        """The newest published version."""
        self.published[version.pack()] = version


def version_of(number: int) -> PolicyVersion | None:
    """The version that this number packs; None for NO_VERSION, which marks tokens that no policy sampled."""
    return None if number == NO_VERSION else PolicyVersion.unpack(number)


def history_of(state: State) -> VersionHistory:
    """The published versions at this state."""
    history = VersionHistory()
    for reached, went_on in (*state.branches, (state.step, None)):
        current = history.current
        for step in range(current.step + 1, reached + 1):
            history.publish(PolicyVersion(current.incarnation, step))
        if went_on is not None:
            history.rollback(went_on)
    return history
