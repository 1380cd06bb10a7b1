"""Ledger, store and journal as one: the only place where the buffer's state changes.

A change is an event: it goes to the journal, then to the ledger, and the store follows. Replaying the journal takes
the same way without writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from service.clock import Clock
from service.errors import JournalError
from service.handoff.batches.batch import CompleteGroup
from service.handoff.journal.frames import Frame
from service.handoff.journal.journal import Journal
from service.handoff.ledger import events
from service.handoff.ledger.accept import Plan, parts
from service.handoff.ledger.applied import Applied, accepted
from service.handoff.ledger.ledger import Ledger
from service.handoff.ledger.lifecycle import USED, GroupState
from service.handoff.ledger.store import Store, cut
from service.handoff.steps.validate import Limits
from service.types import PolicyVersion, StepGroup

OnEnd = Callable[[events.GroupEnd, str, Store, PolicyVersion], None]
"""(the event, the prompt's uid, all steps, the newest version)"""


class Record(Applied):
    """What happened, on disk and in memory."""

    def __init__(self, opened: events.Opened, limits: Limits, journal: Journal, clock: Clock) -> None:
        super().__init__(opened.n_samples, limits, clock)
        self.journal = journal
        self.on_end: OnEnd | None = None
        """Told of every group that ends without being trained, while its steps are still here; never on a replay."""
        self._snapshot_end = 0
        self._replay(opened)

    def add(self, event: events.Journalled) -> None:
        """Let something happen."""
        if self.on_end is not None and isinstance(event, events.GroupEnd):
            uid = self.ledger.state.groups[event.group_id].uid
            self.on_end(event, uid, self.store, self.ledger.history.current)
        self.journal.append(events.EVENT, events.encode(event))
        self.apply(event)
        self._rotate()

    def accept(self, data: bytes, message: StepGroup, made: Plan) -> int:
        """Let a step group in; returns the position up to which the journal must be synced before it counts."""
        before = self.journal.position
        position = self.journal.append(events.STEPS, data)
        self.take_in(message, made, before, position)
        self._rotate()
        return position

    def complete_group(self, group_id: int) -> CompleteGroup:
        """A complete group's data; read back from the journal when it had been used and was rolled back."""
        if group_id not in self.store:
            self._read_back()
            if group_id not in self.store:
                raise JournalError(
                    f"{self.journal.folder} no longer holds group_id {group_id}, which is to be trained again"
                )
        steps, ends = self.store.whole(group_id)
        return CompleteGroup(group_id, self.ledger.state.groups[group_id].uid, steps, ends)

    # -- the journal's size -------------------------------------------------------------------------------------------

    def compact(self) -> None:
        """Begin a new segment early when its snapshot lets older ones go."""
        if self.journal.position > self._snapshot_end and self.journal.freed_below(self._needed_from()):
            self._begin_segment()

    def _rotate(self) -> None:
        if self.journal.segment_is_full:
            self._begin_segment()

    def _begin_segment(self) -> None:
        """Go on in a new segment that begins with a snapshot.

        What the groups need now is what a replay from this snapshot needs, however many of them end meanwhile.
        """
        needed = self._needed_from()
        self._snapshot_end = self.journal.append(events.SNAPSHOT, self.ledger.snapshot(), begins_segment=True)
        self.journal.reclaim(needed, once=self._snapshot_end)

    def _needed_from(self) -> int:
        """Position of the oldest step that a group still needs."""
        needed = (
            group.first_position for group in self.ledger.state.groups.values() if group.first_position is not None
        )
        return min(needed, default=self.journal.position)

    # -- from the journal ---------------------------------------------------------------------------------------------

    def _replay(self, opened: events.Opened) -> None:
        snapshot: Frame | None = None
        for frame in self.journal.replay():
            if frame.kind == events.SNAPSHOT:
                snapshot = frame
        if snapshot is not None:
            self._restore(snapshot)
        elif self.journal.start > 0:
            raise JournalError(f"{self.journal.folder} begins at position {self.journal.start} and has no snapshot")
        for frame in self.journal.read(self.journal.start if snapshot is None else snapshot.end):
            self.apply_frame(frame)
        if self.ledger.state.opened is None:
            self.add(opened)
        elif self.ledger.state.opened != opened:
            begun = self.ledger.state.opened
            raise JournalError(f"{self.journal.folder} holds another run: it began with {begun}, this one is {opened}")

    def _restore(self, snapshot: Frame) -> None:
        self.ledger = Ledger.restored(snapshot.payload)
        self._snapshot_end = snapshot.end
        now = self._clock.monotonic()
        for held in self.ledger.held.values():
            self.last_progress.update(dict.fromkeys(sorted(held), now))
        self.leased_at = dict.fromkeys(self.ledger.state.leases, now)
        self.issued_at.update(dict.fromkeys(sorted(self.ledger.state.groups), now))
        groups = self.ledger.state.groups
        self._fetch([group_id for group_id, group in groups.items() if group.state not in USED], snapshot.position)

    def _read_back(self) -> None:
        """Fetch the steps of all complete or leased groups that had been used and are not in memory."""
        whole = (GroupState.COMPLETE, GroupState.LEASED)
        groups = self.ledger.state.groups
        self.journal.sync()
        missing = [
            group_id for group_id, group in groups.items() if group.state in whole and group_id not in self.store
        ]
        self._fetch(missing, self.journal.synced)

    def _fetch(self, group_ids: Sequence[int], stop: int) -> None:
        """Put the current attempts' steps and ends of some groups into the store, from the journal before `stop`."""
        groups = {group_id: self.ledger.state.groups[group_id] for group_id in group_ids}
        starts = [group.first_position for group in groups.values() if group.first_position is not None]
        frames = self.journal.read(min(starts, default=stop), stop)
        fetch(
            self.store, {group_id: group.current_attempts for group_id, group in groups.items()}, frames, self._limits
        )


def fetch(store: Store, attempts: Mapping[int, Sequence[int]], frames: Iterable[Frame], limits: Limits) -> None:
    """Put the steps and ends of some groups into a store: of each group_id's samples only these attempts, once."""
    seen: set[tuple[int, int, int]] = set()
    for frame in frames:
        if frame.kind == events.STEPS:
            message = accepted(frame, limits)
            for of, part in parts(message).items():
                if of.group_id in attempts and attempts[of.group_id][of.sample] == of.attempt:
                    keys = {(of.group_id, of.sample, int(message.steps.index_K[k])): k for k in reversed(part.steps)}
                    new = [k for key, k in keys.items() if key not in seen]  # the first of each, as when it came
                    seen |= keys.keys()
                    store.add(of.group_id, cut(message, new), part.ends)
