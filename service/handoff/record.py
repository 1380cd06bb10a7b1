"""Ledger, store and journal as one: the only place where the buffer's state changes.

A change is an event: it goes to the journal, then to the ledger, and the store follows. Replaying the journal takes
the same way without writing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from service.clock import Clock
from service.errors import JournalError
from service.handoff import events
from service.handoff.accept import Plan, parts, plan
from service.handoff.batch import CompleteGroup
from service.handoff.journal import Frame, Journal
from service.handoff.ledger import Ledger
from service.handoff.lifecycle import GroupState
from service.handoff.store import Store, cut
from service.handoff.validate import Limits
from service.handoff.wire import decode
from service.types import Refusal, StepGroup


class Record:
    """What happened, on disk and in memory."""

    def __init__(self, opened: events.Opened, limits: Limits, journal: Journal, clock: Clock) -> None:
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
        self._replay(opened)

    def add(self, event: events.Journalled) -> None:
        """Let something happen."""
        self.journal.append(events.EVENT, events.encode(event))
        self._apply(event)

    def accept(self, data: bytes, message: StepGroup, made: Plan) -> int:
        """Let a step group in; returns the position up to which the journal must be synced before it counts."""
        before = self.journal.position
        position = self.journal.append(events.STEPS, data)
        self._accept(message, made, before, position)
        return position

    def complete_group(self, ordinal: int) -> CompleteGroup:
        """A complete group's data; read back from the journal when it had been used and was rolled back."""
        if ordinal not in self.store:
            self._read_back()
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
            if group.state is GroupState.ISSUED:
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

    # -- from the journal ---------------------------------------------------------------------------------------------

    def _replay(self, opened: events.Opened) -> None:
        first: events.Opened | None = None
        for frame in self.journal.replay():
            if frame.kind == events.STEPS:
                self._accept_again(frame)
                continue
            event = events.decode(frame.payload)
            if isinstance(event, events.Opened):
                first = event
            self._apply(event)
        if first is None:
            self.add(opened)
        elif first != opened:
            raise JournalError(f"{self.journal.folder} holds another run: it began with {first}, this one is {opened}")

    def _accept_again(self, frame: Frame) -> None:
        message = decode(frame.payload, self._limits)
        made = message if isinstance(message, Refusal) else plan(self.ledger, self.store, message)
        if isinstance(made, Refusal) or isinstance(message, Refusal):
            raise JournalError(f"{self.journal.folder}: position {frame.position} was accepted, but is refused: {made}")
        self._accept(message, made, frame.position, frame.end)

    def _read_back(self) -> None:
        """Fetch the data of all complete groups that are no longer in memory."""
        groups = self.ledger.state.groups
        missing = {
            ordinal: [trajectory.attempt for trajectory in group.trajectories]
            for ordinal, group in groups.items()
            if group.state is GroupState.COMPLETE and ordinal not in self.store
        }
        self.journal.sync()
        for frame in self.journal.read(min(groups[ordinal].first_position for ordinal in missing)):
            if frame.kind == events.STEPS and isinstance(message := decode(frame.payload, self._limits), StepGroup):
                self._store_parts(message, missing)

    def _store_parts(self, message: StepGroup, missing: dict[int, list[int]]) -> None:
        for of, part in parts(message).items():
            if of.ordinal in missing and missing[of.ordinal][of.sample] == of.attempt:
                self.store.add(of.ordinal, cut(message, part.steps), part.ends)
