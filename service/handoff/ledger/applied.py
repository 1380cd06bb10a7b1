"""Ledger and store as events leave them: what both the running buffer and a replay of its journal do with an event."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from service.clock import Clock
from service.errors import JournalError
from service.handoff.journal.frames import Frame
from service.handoff.ledger import events
from service.handoff.ledger.accept import Plan, plan
from service.handoff.ledger.ledger import Ledger
from service.handoff.ledger.store import Store, cut
from service.handoff.steps.tables import routing_of
from service.handoff.steps.validate import Limits
from service.handoff.steps.wire import decode
from service.types import Refusal, StepGroup


class Applied:
    """Where everything stands after the events so far."""

    def __init__(self, n_samples: int, limits: Limits, clock: Clock) -> None:
        self.ledger = Ledger(n_samples)
        self.store = Store()
        self.revision = 0
        """Events applied so far."""
        self.last_progress: OrderedDict[tuple[int, int], float] = OrderedDict()
        """When each trajectory that a generator holds last moved, longest ago first."""
        self.leased_at: dict[int, float] = {}
        self.issued_at: OrderedDict[int, float] = OrderedDict()
        """When each unfinished group was claimed, longest ago first."""
        self._limits = limits
        self._clock = clock

    def apply(self, event: events.Journalled | events.StepsAccepted) -> None:
        """Let ledger, store and clocks follow an event."""
        leased = self.ledger.state.leases.get(event.lease) if isinstance(event, events.Committed) else None
        self.ledger.apply(event)
        self.revision += 1
        now = self._clock.monotonic()
        match event:
            case events.Issued(group_id=group_id):
                self.issued_at[group_id] = now
                self._held_since(now, group_id, range(self.ledger.state.n_samples))
            case events.Assigned(group_id=group_id, samples=samples):
                self._held_since(now, group_id, samples)
            case (
                events.Restarted(group_id=group_id, samples=samples)
                | events.Truncated(group_id=group_id, samples=samples)
            ):
                self.store.drop_samples(group_id, samples)
                self._no_longer_held(group_id, samples)
            case (
                events.Filtered(group_id=group_id)
                | events.Refused(group_id=group_id)
                | events.Expired(group_id=group_id)
            ):
                self.store.drop(group_id)
                self._no_longer_held(group_id, range(self.ledger.state.n_samples))
            case events.Leased(lease=lease):
                self.leased_at[lease] = now
            case events.Committed(lease=lease) | events.Released(lease=lease):
                self.leased_at.pop(lease, None)
                for group_id in leased.group_ids if leased is not None else ():
                    self.store.drop(group_id)

    def take_in(self, message: StepGroup, made: Plan, before: int, position: int) -> None:
        """Keep what a plan accepts of a message whose frame lies between two positions of the journal."""
        for group_id, part in made.parts.items():
            group = self.ledger.state.groups[group_id]
            if group.first_position is None:
                group.first_position = before
            self.store.add(group_id, cut(message, part.steps), part.ends)
        for (group_id, sample), chain in made.chains.items():
            self.store.set_chain(group_id, sample, chain)
        routing = routing_of(message.steps) if any(part.steps for part in made.parts.values()) else None
        self.apply(events.StepsAccepted(message.sender, made.fresh, position, routing))
        now, held = self._clock.monotonic(), self.ledger.held[message.sender.generator]
        for fresh in made.fresh:
            self.last_progress.pop((fresh.group_id, fresh.sample), None)
            if (fresh.group_id, fresh.sample) in held:
                self.last_progress[fresh.group_id, fresh.sample] = now
            else:
                self.store.no_more_of(fresh.group_id, fresh.sample)

    def _held_since(self, now: float, group_id: int, samples: Iterable[int]) -> None:
        for sample in samples:
            self.last_progress[group_id, sample] = now

    def _no_longer_held(self, group_id: int, samples: Iterable[int]) -> None:
        for sample in samples:
            self.last_progress.pop((group_id, sample), None)

    def apply_frame(self, frame: Frame) -> None:
        """Apply what a journal's frame says."""
        if frame.kind == events.EVENT:
            self.apply(events.decode(frame.payload))
        elif frame.kind == events.STEPS:
            message = accepted(frame, self._limits)
            made = plan(self.ledger, self.store, message)
            if isinstance(made, Refusal):
                raise _refused_now(frame, made)
            self.take_in(message, made, frame.position, frame.end)


def accepted(frame: Frame, limits: Limits) -> StepGroup:
    """The step group in a journal's frame.

    Raises:
        JournalError: it is refused now, such as for a lower `max_group_bytes`.
    """
    message = decode(frame.payload, limits)
    if isinstance(message, Refusal):
        raise _refused_now(frame, message)
    return message


def _refused_now(frame: Frame, refused: Refusal) -> JournalError:
    return JournalError(f"position {frame.position} of the journal was accepted, but is refused: {refused}")
