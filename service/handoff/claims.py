"""Answering a generator's claim: restarted and moved trajectories first, then the next prompt if it is admitted."""

from __future__ import annotations

from collections.abc import Iterator

from service.handoff.admission import Admission
from service.handoff.curriculum import Curriculum
from service.handoff.ledger import events
from service.handoff.ledger.record import Record
from service.handoff.prompt_order import Prompts
from service.handoff.scoring import Scoring
from service.handoff.steps.tables import concat_steps, ends_table
from service.handoff.steps.wire import encode
from service.handoff.verbs import Assignment, Claim, Wait, WaitReason
from service.handoff.waits import Waits
from service.types import PolicyVersion, Sender, StepGroup, Steps


class Claims:
    """Assigns groups and restarted samples to generators; every assignment is an event of the record."""

    def __init__(
        self,
        record: Record,
        prompts: Prompts,
        curriculum: Curriculum,
        admission: Admission,
        waits: Waits,
        scoring: Scoring,
    ) -> None:
        self._record = record
        self._prompts = prompts
        self._curriculum = curriculum
        self._admission = admission
        self._waits = waits
        self._scoring = scoring

    def answer(self, claim: Claim) -> Assignment | Wait:
        """The work for a claim, or what the claim waits for; a repeated claim gets the unfinished part of its first
        answer."""
        state = self._record.ledger.state
        if claim.request_id in state.generators[claim.generator].given:
            return self._given_before(claim)
        who = f"generator {claim.generator}"
        if state.draining is not None:
            return self._waits.begin(who, WaitReason.DRAINED, f"no more prompts are issued: {state.draining}")
        restarted = self._restarted_group(claim.serving)
        why = self._not_admitted(claim.serving) if restarted is None else self._room_is_made()
        if why is not None:
            return self._waits.begin(who, *why)
        self._waits.end(who)
        return self._issue(claim) if restarted is None else self._assign_again(claim, restarted)

    def _given_before(self, claim: Claim) -> Assignment | Wait:
        """The part of a repeated claim's first answer that its generator has not finished."""
        ledger = self._record.ledger
        group_id, attempts = ledger.state.generators[claim.generator].given[claim.request_id]
        groups = ledger.state.groups
        samples = tuple(
            sample
            for sample, attempt in attempts.items()
            if (group_id, sample) in ledger.since and groups[group_id].trajectories[sample].attempt == attempt
        )
        if samples:
            return self._assignment(group_id, samples)
        detail = f"claim {claim.request_id} was answered before and its work continued; send a new claim"
        return Wait(WaitReason.ANSWERED, detail, self._record.clock.monotonic())

    def _restarted_group(self, serving: PolicyVersion) -> int | None:
        """The oldest group with samples to restart or continue, among those that an engine of this version may play."""
        ledger = self._record.ledger
        if not ledger.unassigned:
            return None
        end, groups = self._admission.first_to_wait(ledger, serving), ledger.state.groups
        return min((o for o in ledger.unassigned if o < end and groups[o].admitted <= serving), default=None)

    def _assign_again(self, claim: Claim, group_id: int) -> Assignment:
        samples = tuple(sorted(self._record.ledger.unassigned[group_id]))
        self._record.add(events.Assigned(group_id, samples, claim.generator, claim.incarnation, claim.request_id))
        return self._assignment(group_id, samples)

    def _room_is_made(self) -> tuple[WaitReason, str] | None:
        """Why restarted samples have to wait: a full journal must first remove their last attempts; None if they need
        not wait. A restart needs no new admission."""
        why = self._admission.disk_wait(self._record, 0)
        return why if self._record.journal.reclaims else None

    def _not_admitted(self, serving: PolicyVersion) -> tuple[WaitReason, str] | None:
        record = self._record
        why = self._admission.wait(record, serving)
        return why or self._admission.disk_wait(record, record.ledger.state.n_samples)

    def _issue(self, claim: Claim) -> Assignment:
        state = self._record.ledger.state
        group_id = state.next_group_id
        place = self._curriculum.next_place()
        row = self._prompts.row(place)
        who = (claim.generator, claim.incarnation)
        uid, scorers = self._prompts.uid(row), self._scoring.of_row(row)
        self._record.add(events.Issued(group_id, row, uid, *who, claim.serving, claim.request_id, place, scorers))
        return self._assignment(group_id, tuple(range(state.n_samples)))

    def unfinished(self, generator: str) -> Iterator[Assignment]:
        """The unfinished trajectories of a generator, by group."""
        for group_id, samples in self._record.ledger.played_by(generator).items():
            yield self._assignment(group_id, tuple(samples))

    def _assignment(self, group_id: int, samples: tuple[int, ...]) -> Assignment:
        group, held = self._record.ledger.state.groups[group_id], self._record.store.of(group_id)
        attempts = tuple(group.trajectories[sample].attempt for sample in samples)
        steps = tuple(_as_message(held.steps_of(sample)) for sample in samples) if held.steps else ()
        return Assignment(group_id, group.uid, group.row, samples, attempts, steps)


def _as_message(tables: list[Steps]) -> bytes:
    """The steps of one trajectory as wire bytes; empty without steps."""
    return encode(StepGroup(Sender("", 0, 0), concat_steps(tables), ends_table(()))) if tables else b""
