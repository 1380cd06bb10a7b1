"""Answering a generator's claim: restarted trajectories first, then the next prompt if it is admitted."""

from __future__ import annotations

from service.handoff.admission import Admission
from service.handoff.ledger import events
from service.handoff.ledger.record import Record
from service.handoff.prompts import Prompts
from service.handoff.verbs import Assignment, Claim, Wait, WaitReason
from service.handoff.waits import Waits
from service.types import PolicyVersion


class Claims:
    """Gives out work; every assignment is an event of the record."""

    def __init__(self, record: Record, prompts: Prompts, admission: Admission, waits: Waits) -> None:
        self._record = record
        self._prompts = prompts
        self._admission = admission
        self._waits = waits

    def answer(self, claim: Claim) -> Assignment | Wait:
        """The work of a claim, or what it waits for; a repeated claim gets what is left of the same work."""
        state = self._record.ledger.state
        if claim.request_id in state.generators[claim.generator].given:
            return self._given_before(claim)
        who = f"generator {claim.generator}"
        if state.draining is not None:
            return self._waits.begin(who, WaitReason.DRAINED, f"no more prompts are issued: {state.draining}")
        assignment = self._restarted_work(claim)
        if assignment is None:
            if (why := self._not_admitted(claim.serving)) is not None:
                return self._waits.begin(who, *why)
            assignment = self._issue(claim)
        self._waits.end(who)
        return assignment

    def _given_before(self, claim: Claim) -> Assignment | Wait:
        """What a claim got when it was first answered, as far as its generator still holds it."""
        ledger = self._record.ledger
        group_id, attempts = ledger.state.generators[claim.generator].given[claim.request_id]
        groups = ledger.state.groups
        samples = tuple(
            sample
            for sample, attempt in attempts.items()
            if (group_id, sample) in ledger.held and groups[group_id].trajectories[sample].attempt == attempt
        )
        if samples:
            return self._assignment(group_id, samples)
        detail = f"claim {claim.request_id} was answered before and its work went on; send a new claim"
        return Wait(WaitReason.ANSWERED, detail, self._record.clock.monotonic())

    def _restarted_work(self, claim: Claim) -> Assignment | None:
        """Samples that start anew, for an engine that serves no older version than their group was admitted with."""
        ledger = self._record.ledger
        for group_id in sorted(ledger.unassigned):
            if ledger.state.groups[group_id].admitted <= claim.serving:
                samples = tuple(sorted(ledger.unassigned[group_id]))
                self._record.add(
                    events.Assigned(group_id, samples, claim.generator, claim.incarnation, claim.request_id)
                )
                return self._assignment(group_id, samples)
        return None

    def _not_admitted(self, serving: PolicyVersion) -> tuple[WaitReason, str] | None:
        record = self._record
        if (why := self._admission.wait(record.ledger, serving, record.store.n_bytes)) is not None:
            return why
        if (why := self._admission.disk_wait(record.ledger, record.journal)) is not None:
            record.compact()
        return why

    def _issue(self, claim: Claim) -> Assignment:
        state = self._record.ledger.state
        group_id = state.next_group_id
        row = self._prompts.row(group_id)
        who = (claim.generator, claim.incarnation)
        self._record.add(events.Issued(group_id, row, self._prompts.uid(row), *who, claim.serving, claim.request_id))
        return self._assignment(group_id, tuple(range(state.n_samples)))

    def _assignment(self, group_id: int, samples: tuple[int, ...]) -> Assignment:
        group = self._record.ledger.state.groups[group_id]
        attempts = tuple(group.trajectories[sample].attempt for sample in samples)
        return Assignment(group_id, group.uid, group.row, samples, attempts)
