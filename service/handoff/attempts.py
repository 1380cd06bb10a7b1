"""Restarts or ends trajectories that fail, make no progress, are refused or take too long."""

from __future__ import annotations

from dataclasses import dataclass

from service.handoff.batches.filters import FilterSettings, examine
from service.handoff.ledger import events
from service.handoff.ledger.events import GroupState
from service.handoff.ledger.ledger import Sample
from service.handoff.ledger.record import Record
from service.handoff.steps.tables import trajectory_ids
from service.types import Refusal, RefusalReason, StepGroup

RUN_END = "run_end"
GROUP_DEADLINE = "group_deadline"


@dataclass(frozen=True, slots=True)
class AttemptSettings:
    """Limits on the attempts of trajectories, and on the time that trajectories and groups take."""

    max_attempts: int = 3
    step_deadline: float = 300.0
    """Seconds without progress after which a trajectory is restarted."""
    group_deadline: float | None = None
    """Seconds from a group's claim to its deadline; None: no deadline."""


class Attempts:
    """Decides which trajectories restart as new attempts; every decision is an event of the record."""

    def __init__(self, settings: AttemptSettings, filters: FilterSettings, record: Record) -> None:
        self._settings, self._filters, self._record = settings, filters, record
        self.called: dict[str, set[Sample]] = {}
        """For each generator, the trajectories that moved to it and then called the policy."""

    def restart(self, group_id: int, sample: int, reason: str) -> None:
        """Start a trajectory again. If it has no attempt left, or the run is ending, its group ends instead."""
        trajectory = self._record.ledger.state.groups[group_id].trajectories[sample]
        if self._record.ledger.state.draining is not None:
            self._record.add(events.Ended(group_id, GroupState.EXPIRED, RUN_END))
        elif trajectory.failures + 1 >= self._settings.max_attempts:
            self._record.add(events.Ended(group_id, GroupState.REFUSED, RefusalReason.MAX_ATTEMPTS))
        else:
            self._record.add(events.Restarted(group_id, (sample,), reason))

    def leave(self, generator: str, died: bool) -> None:
        """Let other generators continue the unfinished trajectories of a generator that has left, or start them again.

        If the generator died, each trajectory that began there or called the policy there may be the cause. After a
        first such death it moves; after further deaths it moves only if it may fail once more."""
        ledger, most = self._record.ledger, max(self._settings.max_attempts, 2)
        moves = ledger.state.generators[generator].resumes and ledger.state.draining is None
        called = self.called.pop(generator, set())
        for group_id, sample in ledger.played_by(generator):
            if (group_id, sample) not in ledger.since:  # its group has ended
                continue
            of = ledger.state.groups[group_id].trajectories[sample]
            counts = died and (not of.moved or (group_id, sample) in called)
            if moves and not (counts and of.deaths and of.failures + 1 >= most):
                self._record.add(events.Moved(group_id, (sample,), counts))
            else:
                self.restart(group_id, sample, "generator_left")

    def lose(self, group_id: int, sample: int, reason: str) -> None:
        """Restart a failed trajectory; if it has no attempt left, or the run is ending, the group continues without it,
        or ends if fewer than two others remain."""
        state = self._record.ledger.state
        can_restart = state.groups[group_id].trajectories[sample].failures + 1 < self._settings.max_attempts
        if (can_restart and state.draining is None) or not self._goes_on_without(group_id, (sample,), reason):
            self.restart(group_id, sample, reason)

    def _goes_on_without(self, group_id: int, samples: tuple[int, ...], reason: str) -> bool:
        """Continue a group without some samples; False if fewer than two remain: a single sample has no baseline."""
        trajectories = self._record.ledger.state.groups[group_id].trajectories
        others = [s for s, other in enumerate(trajectories) if s not in samples and not other.given_up]
        if len(others) < 2:
            return False
        self._record.add(events.GivenUp(group_id, samples, reason))
        examine(self._record, self._filters)
        return True

    def end_overdue_groups(self, now: float) -> None:
        """Let groups past `buffer.group_deadline` continue without their unfinished trajectories, or expire."""
        issued_at, deadline = self._record.ledger.issued_at, self._settings.group_deadline
        while issued_at and deadline is not None:
            group_id, since = next(iter(issued_at.items()))
            if now - since < deadline:
                break
            trajectories = self._record.ledger.state.groups[group_id].trajectories
            unfinished = tuple(s for s, trajectory in enumerate(trajectories) if not trajectory.complete)
            if not self._goes_on_without(group_id, unfinished, GROUP_DEADLINE):
                self._record.add(events.Ended(group_id, GroupState.EXPIRED, GROUP_DEADLINE))

    def restart_refused(self, message: StepGroup, refused: Refusal) -> None:
        """Restart the trajectory of a refused message, because it cannot become complete without the message. Nothing
        restarts if the message is about several trajectories, or none that its sender plays, or has a wrong id."""
        ids = {*trajectory_ids(message.steps), *trajectory_ids(message.ends)}
        if len(ids) != 1 or refused.reason is RefusalReason.IDENTITY:
            return
        of = ids.pop()
        if self._record.ledger.plays(message.sender, of):
            self.restart(of.group_id, of.sample, f"refused_{refused.reason}")

    def restart_silent(self, now: float) -> None:
        """Restart trajectories that have made no progress for `buffer.step_deadline` seconds."""
        waiting = self._record.ledger.since
        while waiting:
            (group_id, sample), since = next(iter(waiting.items()))
            if now - since < self._settings.step_deadline:
                break
            self.restart(group_id, sample, "silent")
