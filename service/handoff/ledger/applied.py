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
            case events.Issued(ordinal=ordinal):
                self.issued_at[ordinal] = now
                self._held_since(now, ordinal, range(self.ledger.state.n_samples))
            case events.Assigned(ordinal=ordinal, samples=samples):
                self._held_since(now, ordinal, samples)
            case (
                events.Restarted(ordinal=ordinal, samples=samples) | events.Curtailed(ordinal=ordinal, samples=samples)
            ):
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

    def take_in(self, message: StepGroup, made: Plan, before: int, position: int) -> None:
        """Keep what a plan accepts of a message whose frame lies between two positions of the journal."""
        for ordinal, part in made.parts.items():
            group = self.ledger.state.groups[ordinal]
            if group.first_position is None:
                group.first_position = before
            self.store.add(ordinal, cut(message, part.steps), part.ends)
        for (ordinal, sample), chain in made.chains.items():
            self.store.set_chain(ordinal, sample, chain)
        routing = routing_of(message.steps) if any(part.steps for part in made.parts.values()) else None
        self.apply(events.StepsAccepted(message.sender, made.fresh, position, routing))
        now, held = self._clock.monotonic(), self.ledger.held[message.sender.generator]
        for fresh in made.fresh:
            self.last_progress.pop((fresh.ordinal, fresh.sample), None)
            if (fresh.ordinal, fresh.sample) in held:
                self.last_progress[fresh.ordinal, fresh.sample] = now
            else:
                self.store.no_more_of(fresh.ordinal, fresh.sample)

    def _held_since(self, now: float, ordinal: int, samples: Iterable[int]) -> None:
        for sample in samples:
            self.last_progress[ordinal, sample] = now

    def _no_longer_held(self, ordinal: int, samples: Iterable[int]) -> None:
        for sample in samples:
            self.last_progress.pop((ordinal, sample), None)

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
