"""The record of all events, on disk and in memory: every decision of the buffer is applied here.

A change is an event, which goes to the journal, then to the ledger and to the store of accepted steps:

    Record.add     event    -> Journal, Ledger, Store
    Record.accept  message  -> Journal, Ledger, Store       (the message's bytes are the journal's frame)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from service.clock import Clock
from service.columns import bytes_per_token, concat, select
from service.handoff.journal.journal import Journal
from service.handoff.ledger import events
from service.handoff.ledger.events import Addition
from service.handoff.ledger.ledger import Ledger
from service.handoff.ledger.scores import CompleteGroup, with_scores
from service.handoff.ledger.state import State
from service.handoff.steps.tables import ends_table, steps_table
from service.handoff.steps.values import Limits, Routing
from service.types import Ends, PolicyVersion, StepGroup, Steps, TrajectoryEnd


@dataclass(slots=True)
class GroupData:
    """What was accepted of the current attempts of one group: steps (as they came), end records, scorers' answers."""

    steps: list[Steps] = field(default_factory=list)
    ends: dict[int, TrajectoryEnd] = field(default_factory=dict)
    """The end records of trajectories, by sample."""
    places: dict[int, dict[int, tuple[Steps, int]]] = field(default_factory=dict)
    """For each sample and step index: the table with the step, and its position there."""
    scores: dict[str, events.Scored] = field(default_factory=dict)
    """The scorers' answers, by name of the scorer."""

    def add(self, table: Steps) -> None:
        """Add a table of accepted steps."""
        self.steps.append(table)
        for k, (sample, index) in enumerate(zip(table.sample_K.tolist(), table.index_K.tolist(), strict=True)):
            self.places.setdefault(sample, {})[index] = (table, k)

    def steps_of(self, sample: int) -> list[Steps]:
        return [
            select(table, index_K) for table in self.steps if len(index_K := np.flatnonzero(table.sample_K == sample))
        ]

    def samples(self) -> list[int]:
        """The samples (numbers of trajectories in the group) of which a step or the end record was accepted."""
        return sorted({*self.ends, *(int(sample) for table in self.steps for sample in np.unique(table.sample_K))})

    def rearrange(self, steps: list[Steps]) -> None:
        """Replace the tables of steps by other tables with the same steps, or with some of these steps."""
        self.steps, self.places = [], {}
        for table in steps:
            self.add(table)


class Store:
    """Accepted steps and end records of the groups that may still be trained, cut out of their messages, so that no
    group keeps another group's tokens in memory."""

    def __init__(self) -> None:
        self.expert_bytes = 0
        """Bytes of a token's routed experts; 0 until a step has some. From then on, all steps have that column."""
        self.held: dict[int, GroupData] = {}

    def token_bytes(self, steps: Steps) -> int:
        """Bytes of one token of a table, as `service.handoff.group_bytes` counts them."""
        return bytes_per_token(steps) + (self.expert_bytes if steps.routed_experts_N is None else 0)

    def of(self, group_id: int) -> GroupData:
        """The steps, end records and scores of a group; empty once the group was dropped."""
        return self.held.get(group_id) or GroupData()

    def add(self, group_id: int, steps: Steps, items: Sequence[int], ends: Sequence[TrajectoryEnd]) -> None:
        """Add the accepted steps at the positions `items` of a message, and end records, to a group."""
        held = self.held.setdefault(group_id, GroupData())
        if items:
            held.add(steps if len(items) == len(steps) else select(steps, np.array(items, np.int64), copy=True))
        for end in ends:
            held.ends[end.trajectory.sample] = end

    def add_score(self, event: events.Scored) -> None:
        self.held.setdefault(event.group_id, GroupData()).scores.setdefault(event.scorer, event)

    def drop_samples(self, group_id: int, samples: tuple[int, ...]) -> None:
        held = self.of(group_id)
        of_others = [~np.isin(table.sample_K, samples) for table in held.steps]
        both = zip(held.steps, of_others, strict=True)
        held.rearrange([t if kept_K.all() else select(t, np.flatnonzero(kept_K)) for t, kept_K in both if kept_K.any()])
        held.ends = {sample: end for sample, end in held.ends.items() if sample not in samples}

    def whole(self, group_id: int) -> tuple[Steps, Ends, tuple[events.Scored, ...]]:
        """All steps, end records and scores of a complete group, changed by the scorers' answers."""
        return with_scores(*self.unscored(group_id), self.scores(group_id))

    def scores(self, group_id: int) -> tuple[events.Scored, ...]:
        """The scorers' answers about a group so far, sorted by name of the scorer."""
        scores = self.of(group_id).scores
        return tuple(scores[name] for name in sorted(scores))

    def unscored(self, group_id: int) -> tuple[Steps, Ends]:
        """All steps and end records of a complete group, not changed by scorers' answers."""
        held = self.held[group_id]
        if len(held.steps) > 1:
            held.rearrange([concat(held.steps)])
        ends = [held.ends[sample] for sample in sorted(held.ends)]
        return held.steps[0] if held.steps else steps_table([]), ends_table(ends)


def expert_bytes(ledger: Ledger, routing: Routing | None) -> int:
    """Bytes of a token's routed experts, shaped as in the first accepted step with experts; 0 before it."""
    of_expert = np.dtype(np.int16) if routing is None else routing.dtype
    return of_expert.itemsize * math.prod(ledger.state.routing) if ledger.state.routing else 0


OnFailure = Callable[[TrajectoryEnd, str, Store, PolicyVersion], None]
"""A function called with the end record of the lost attempt, the reason, the accepted steps and the newest version."""
OnEnd = Callable[[events.Ended, str, Store, PolicyVersion], None]
"""A function called with the event, the uid of the prompt, the accepted steps and the newest version."""


class Record:
    """Journal, ledger and store, changed together."""

    def __init__(self, limits: Limits, journal: Journal, clock: Clock) -> None:
        """Make an empty record; `service.handoff.ledger.replaying.opened_record` restores one from a journal."""
        self.journal, self.limits, self.clock = journal, limits, clock
        self.ledger = Ledger(State(limits.n_samples_per_prompt))
        self.store = Store()
        self.revision = 0
        """Events applied so far."""
        self.on_end: OnEnd | None = None
        """Called before a group ends untrained, while the store still has its steps; never on a replay."""
        self.on_failure: OnFailure | None = None
        """Called before a failed attempt, or an attempt without a scorer's reward, is dropped; never on a replay."""
        self.snapshot_end = 0

    def add(self, event: events.Event) -> None:
        """Append an event to the journal and apply it."""
        if self.on_end is not None and isinstance(event, events.Ended):
            uid = self.ledger.state.groups[event.group_id].uid
            self.on_end(event, uid, self.store, self.ledger.history.current)
        kind = events.SCORES if isinstance(event, events.Scored) else events.EVENT
        self.journal.append(kind, events.encode(event))
        self.apply(event)
        if self.journal.segment_is_full:
            self.begin_segment()

    def lost(self, end: TrajectoryEnd, reason: str) -> None:
        """Call `on_failure` with the end record of an attempt that failed, or to which a scorer gave no reward."""
        if self.on_failure is not None:
            self.on_failure(end, reason, self.store, self.ledger.history.current)

    def accept(self, data: bytes, message: StepGroup, additions: Sequence[Addition]) -> None:
        """Append an accepted message to the journal and apply it."""
        position = self.journal.position
        self.journal.append(events.STEPS, data)
        self.apply_steps(message, additions, position)
        if self.journal.segment_is_full:
            self.begin_segment()

    @property
    def n_bytes(self) -> int:
        """Bytes of all steps, end records and scores in memory, as `service.handoff.group_bytes` counts them."""
        return sum(self.ledger.state.groups[group_id].n_bytes for group_id in self.store.held)

    def complete_group(self, group_id: int) -> CompleteGroup:
        """A complete group whose steps and end records are in memory; `replaying.load_groups` reads others back."""
        return CompleteGroup(group_id, self.ledger.state.groups[group_id].uid, *self.store.whole(group_id))

    # -- the same without the journal ---------------------------------------------------------------------------------

    def apply(self, event: events.Event) -> None:
        """Apply an event to the ledger and the store."""
        leases = self.ledger.state.leases
        leased = leases[event.lease].group_ids if isinstance(event, events.Committed) else ()
        if isinstance(event, events.Scored) and event.scorer in self.ledger.state.groups[event.group_id].awaited:
            self.store.add_score(event)
        self.ledger.apply(event, self.clock.monotonic())
        self.revision += 1
        if isinstance(event, events.Restarted | events.GivenUp):
            self.store.drop_samples(event.group_id, event.samples)
        for group_id in (event.group_id,) if isinstance(event, events.Ended) else leased:
            self.store.held.pop(group_id, None)

    def apply_steps(self, message: StepGroup, additions: Sequence[Addition], position: int) -> None:
        """Apply the new content of a message, whose frame begins at `position` of the journal."""
        ledger, by_group = self.ledger, dict[int, list[Addition]]()
        for new in additions:
            by_group.setdefault(new.group_id, []).append(new)
        for group_id, of_group in by_group.items():
            group = ledger.state.groups[group_id]
            group.first_position = position if group.first_position is None else group.first_position
            items = sorted(k for new in of_group for k in new.items)
            ends = [new.end for new in of_group if new.end is not None]
            self.store.add(group_id, message.steps, items, ends)
        experts_N = message.steps.routed_experts_N
        routing = experts_N.shape[1:] if experts_N is not None and any(new.items for new in additions) else None
        ledger.accept(message.sender, additions, routing, self.clock.monotonic())
        self.store.expert_bytes = expert_bytes(ledger, self.limits.routing)
        self.revision += 1

    # -- the journal's size -------------------------------------------------------------------------------------------

    def begin_segment(self) -> None:
        """Begin a new segment of the journal with a snapshot, and mark segments for removal. Segments with steps
        that a group needs stay, because a replay of the snapshot reads these steps."""
        needed = self.needed_from()
        state = msgspec.msgpack.encode(self.ledger.state)
        self.snapshot_end = self.journal.append(events.SNAPSHOT, state, begins_segment=True)
        self.journal.reclaim(needed, once=self.snapshot_end)

    def needed_from(self) -> int:
        """Journal position of the oldest step that a group still needs, or of the next frame."""
        positions = (group.first_position for group in self.ledger.state.groups.values())
        return min((p for p in positions if p is not None), default=self.journal.position)
