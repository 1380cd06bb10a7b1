"""Ledger, store and journal as one: the only place where the buffer's state changes.

A change is an event: it goes to the journal, then to the ledger, and the store follows. Replaying the journal takes
the same way without writing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from service.clock import Clock
from service.errors import JournalError
from service.handoff import events
from service.handoff.accept import Plan, parts, plan
from service.handoff.batch import CompleteGroup
from service.handoff.frames import Frame
from service.handoff.journal import Journal
from service.handoff.ledger import Ledger
from service.handoff.lifecycle import USED, Group, GroupState
from service.handoff.store import Store, cut
from service.handoff.validate import Limits
from service.handoff.wire import decode
from service.types import Refusal, StepGroup


class Record:
    """What happened, on disk and in memory."""

    def __init__(
        self, opened: events.Opened, limits: Limits, journal: Journal, clock: Clock, keeps_used: bool = True
    ) -> None:
        self.ledger = Ledger(opened.n_samples)
        self.store = Store()
        self.journal = journal
        self.revision = 0
        """Events applied so far."""
        self.last_progress: OrderedDict[tuple[int, int], float] = OrderedDict()
        """When each trajectory that a generator holds last moved, longest ago first."""
        self.leased_at: dict[int, float] = {}
        self._limits = limits
        self._clock = clock
        self._keeps_used = keeps_used
        """Whether used groups may be asked for again, so that their frames must stay."""
        self._snapshot_position = 0
        self._replay(opened)

    def add(self, event: events.Journalled) -> None:
        """Let something happen."""
        self.journal.append(events.EVENT, events.encode(event))
        self._apply(event)
        if isinstance(event, events.Committed | events.Covered):
            self._reclaim()
        self._rotate()

    def accept(self, data: bytes, message: StepGroup, made: Plan) -> int:
        """Let a step group in; returns the position up to which the journal must be synced before it counts."""
        before = self.journal.position
        position = self.journal.append(events.STEPS, data)
        self._accept(message, made, before, position)
        self._rotate()
        return position

    def complete_group(self, ordinal: int) -> CompleteGroup:
        """A complete group's data; read back from the journal when it had been used and was rolled back."""
        if ordinal not in self.store:
            self._read_back()
            if ordinal not in self.store:
                raise JournalError(
                    f"{self.journal.folder} no longer holds ordinal {ordinal}, which is to be trained again"
                )
        steps, ends = self.store.whole(ordinal)
        return CompleteGroup(ordinal, self.ledger.state.groups[ordinal].uid, steps, ends)

    # -- one event ----------------------------------------------------------------------------------------------------

    def _apply(self, event: events.Journalled | events.StepsAccepted) -> None:
        leased = self.ledger.state.leases.get(event.lease) if isinstance(event, events.Committed) else None
        self.ledger.apply(event)
        self.revision += 1
        now = self._clock.monotonic()
        match event:
            case events.Issued(ordinal=ordinal):
                self._held_since(now, ordinal, range(self.ledger.state.n_samples))
            case events.Assigned(ordinal=ordinal, samples=samples):
                self._held_since(now, ordinal, samples)
            case events.Restarted(ordinal=ordinal, samples=samples):
                self.store.drop_samples(ordinal, samples)
                self._no_longer_held(ordinal, samples)
            case events.Filtered(ordinal=ordinal) | events.Refused(ordinal=ordinal) | events.Expired(ordinal=ordinal):
                self.store.drop(ordinal)
                self._no_longer_held(ordinal, range(self.ledger.state.n_samples))
            case events.Leased(lease=lease):
                self.leased_at[lease] = now
            case events.Committed(lease=lease) | events.Released(lease=lease):
                self.leased_at.pop(lease, None)
                for ordinal in leased.ordinals if leased is not None else ():
                    self.store.drop(ordinal)

    def _accept(self, message: StepGroup, made: Plan, before: int, position: int) -> None:
        for ordinal, part in made.parts.items():
            group = self.ledger.state.groups[ordinal]
            if group.first_position is None:
                group.first_position = before
            self.store.add(ordinal, cut(message, part.steps), part.ends)
        for (ordinal, sample), chain in made.chains.items():
            self.store.set_chain(ordinal, sample, chain)
        self._apply(events.StepsAccepted(message.sender, made.fresh, position))
        now, held = self._clock.monotonic(), self.ledger.held[message.sender.generator]
        for fresh in made.fresh:
            self.last_progress.pop((fresh.ordinal, fresh.sample), None)
            if (fresh.ordinal, fresh.sample) in held:
                self.last_progress[fresh.ordinal, fresh.sample] = now

    def _held_since(self, now: float, ordinal: int, samples: Iterable[int]) -> None:
        for sample in samples:
            self.last_progress[ordinal, sample] = now

    def _no_longer_held(self, ordinal: int, samples: Iterable[int]) -> None:
        for sample in samples:
            self.last_progress.pop((ordinal, sample), None)

    # -- the journal's size -------------------------------------------------------------------------------------------

    def _rotate(self) -> None:
        """Begin a new segment with a snapshot when the current one is full."""
        if self.journal.segment_is_full:
            self._snapshot_position = self.journal.position
            self.journal.append(events.SNAPSHOT, self.ledger.snapshot(), begins_segment=True)
            self._reclaim()

    def _reclaim(self) -> None:
        """Give up what no group needs any more and a snapshot makes dispensable."""
        needed = (
            group.first_position
            for group in self.ledger.state.groups.values()
            if group.first_position is not None and (self._keeps_used or group.state not in USED)
        )
        self.journal.reclaim(min((*needed, self._snapshot_position)))

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
            if frame.kind == events.STEPS:
                self._accept_again(frame)
            elif frame.kind == events.EVENT:
                self._apply(events.decode(frame.payload))
        if self.ledger.state.opened is None:
            self.add(opened)
        elif self.ledger.state.opened != opened:
            begun = self.ledger.state.opened
            raise JournalError(f"{self.journal.folder} holds another run: it began with {begun}, this one is {opened}")

    def _restore(self, snapshot: Frame) -> None:
        self.ledger = Ledger.restored(snapshot.payload)
        self._snapshot_position = snapshot.position
        now = self._clock.monotonic()
        for held in self.ledger.held.values():
            self.last_progress.update(dict.fromkeys(sorted(held), now))
        self.leased_at = dict.fromkeys(self.ledger.state.leases, now)
        groups = self.ledger.state.groups
        self._fetch([ordinal for ordinal, group in groups.items() if group.state not in USED], snapshot.position)

    def _accept_again(self, frame: Frame) -> None:
        message = decode(frame.payload, self._limits)
        made = message if isinstance(message, Refusal) else plan(self.ledger, self.store, message)
        if isinstance(made, Refusal) or isinstance(message, Refusal):
            raise JournalError(f"{self.journal.folder}: position {frame.position} was accepted, but is refused: {made}")
        self._accept(message, made, frame.position, frame.end)

    def _read_back(self) -> None:
        """Fetch the steps of all complete or leased groups that had been used and are not in memory."""
        whole = (GroupState.COMPLETE, GroupState.LEASED)
        groups = self.ledger.state.groups
        self.journal.sync()
        missing = [ordinal for ordinal, group in groups.items() if group.state in whole and ordinal not in self.store]
        self._fetch(missing, self.journal.synced)

    def _fetch(self, ordinals: Sequence[int], stop: int) -> None:
        """Put the current attempts' steps and ends of some groups into the store, from the journal before `stop`."""
        groups = {ordinal: self.ledger.state.groups[ordinal] for ordinal in ordinals}
        starts = [group.first_position for group in groups.values() if group.first_position is not None]
        attempts = {
            (ordinal, sample): attempt
            for ordinal, group in groups.items()
            for sample, attempt in enumerate(_attempts(group))
        }
        seen: set[tuple[int, int, int]] = set()
        for frame in self.journal.read(min(starts, default=stop), stop):
            if frame.kind == events.STEPS and isinstance(message := decode(frame.payload, self._limits), StepGroup):
                for of, part in parts(message).items():
                    if attempts.get((of.ordinal, of.sample)) == of.attempt:
                        keys = {(of.ordinal, of.sample, int(message.steps.index_K[k])): k for k in part.steps}
                        new = [k for key, k in keys.items() if key not in seen]
                        seen |= keys.keys()
                        self.store.add(of.ordinal, cut(message, new), part.ends)


def _attempts(group: Group) -> tuple[int, ...]:
    """By sample the attempt that counts."""
    return group.attempts or tuple(trajectory.attempt for trajectory in group.trajectories)
