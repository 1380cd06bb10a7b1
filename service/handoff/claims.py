"""Answers a generator's claim: first with restarted or moved trajectories, then with the next prompt if its group is
admitted.

A claim for which there is no group waits; after each change of the buffer, one waiting claim is answered per available
group. If a claim has to wait, all claims of engines with the same or an older version have to wait too:

    waiting     g1 serves 4    g2 serves 4    g3 serves 5    g4 serves 4    ...
    tried       g1: group 17   g2: wait       g3: wait                            three tries, however many claims wait

**Admission** limits the unfinished work, and so the staleness of tokens and the memory and disk space of their steps.
Groups get numbered slots in the order in which they are admitted; the slot of a group that ends untrained is given to
a later group. With mini-batches of B groups, slot s belongs to mini-batch floor(s / B), and is admitted once the
engine of the claiming generator serves version floor(s / B) - lookahead:

    B = 2, lookahead = 1, the engine serves version 0:  slots 0 1 | 2 3 are admitted, slot 4 waits for version 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from service.columns import concat
from service.handoff.buffer_settings import BufferSettings
from service.handoff.group_bytes import EVENT_BYTES, TEACHER_BYTES
from service.handoff.journal.journal import Journal
from service.handoff.leases import Waits
from service.handoff.ledger import events
from service.handoff.ledger.ledger import Ledger, Sample
from service.handoff.ledger.record import Record
from service.handoff.ledger.replaying import make_room
from service.handoff.prompt_order import Curriculum
from service.handoff.scoring import Scoring
from service.handoff.steps.tables import ends_table
from service.handoff.steps.wire import encode
from service.handoff.verbs import Assignment, Claim, ClaimAnswer, Wait, WaitReason
from service.types import PolicyVersion, Sender, StepGroup, TrajectoryId


class Admission:
    """Decides whether one more group may be issued, or has to wait for newer weights, for memory or for disk space."""

    def __init__(self, settings: BufferSettings) -> None:
        self._settings, self._worst = settings, settings.worst

    def reserved(self, record: Record) -> int:
        """Bytes of accepted steps, in memory or to be read back, and of steps that unfinished trajectories may add."""
        groups, next_ones = record.ledger.state.groups, record.ledger.finished[: self._settings.mini_batch_size]
        to_read_back = sum(groups[o].n_bytes for _, o in next_ones if o not in record.store.held)
        return record.n_bytes + to_read_back + self._to_come(record.ledger)

    def journal_limit(self, journal: Journal) -> int:
        """Bytes of the journal that steps may take; one segment stays free for frames that `compaction` copies."""
        return self._settings.max_journal_bytes - journal.segment_bytes

    def disk_wait(self, record: Record, n_samples: int) -> tuple[WaitReason, str] | None:
        """Why there is no room on disk for `n_samples` more trajectories; then the removal of frames begins."""
        journal, groups = record.journal, record.ledger.state.groups.values()
        worst = self._to_come(record.ledger) + n_samples * self._worst.trajectory + EVENT_BYTES
        held, limit = journal.position - journal.start, self.journal_limit(journal)
        missing = held + worst - limit
        if missing <= 0 and journal.reserve(worst):
            return None
        needed = sum(group.n_bytes for group in groups) + worst + self._worst.group
        enough = needed <= limit and journal.reserve(worst + journal.segment_bytes)
        make_room(record, wanted=missing if enough else 0)
        if missing <= 0:
            return WaitReason.DISK, f"{journal.folder} has no room for {worst} more bytes"
        bound = f"{limit} of buffer.max_journal_bytes ({self._settings.max_journal_bytes}) are for steps"
        return WaitReason.DISK, f"the journal holds {held} bytes and may need {worst} more, {bound}"

    def wait(self, record: Record, serving: PolicyVersion) -> tuple[WaitReason, str] | None:
        """Why an engine that serves version `serving` has to wait before it gets a group, also in words; else None."""
        ledger = record.ledger
        batch = ledger.next_slot // self._settings.mini_batch_size
        ahead = self._settings.lookahead
        if batch > effective_step(ledger, serving) + ahead:
            due = f"waits for the weights of step {batch - ahead} (lookahead {ahead})"
            return WaitReason.LOOKAHEAD, f"{due}; has those of step {serving.step}"
        needed = self.reserved(record) + self._worst.group
        if needed > (max_bytes := self._settings.max_bytes):
            return WaitReason.BYTES, f"one more group may need {needed} bytes in all, buffer.max_bytes is {max_bytes}"
        return None

    def first_to_wait(self, ledger: Ledger, serving: PolicyVersion) -> int:
        """The smallest group_id for which the version `serving` is too old, for example after a trainer went back."""
        batches = effective_step(ledger, serving) + self._settings.lookahead + 1
        free = batches * self._settings.mini_batch_size - (ledger.next_slot - len(ledger.slots))
        return next(islice(ledger.slots, max(free, 0), None), ledger.state.next_group_id)

    def _to_come(self, ledger: Ledger) -> int:
        """Maximum bytes that unfinished trajectories and scorers' answers may still add to the accepted bytes."""
        scoring = [ledger.state.groups[group_id] for group_id in ledger.scoring]
        answers = sum(len(group.trajectories) * self._worst.scores + group.tokens * TEACHER_BYTES for group in scoring)
        return max(ledger.unfinished * self._worst.trajectory - ledger.unfinished_bytes, 0) + answers


def effective_step(ledger: Ledger, version: PolicyVersion) -> int:
    """The optimizer step of a version; if that step was undone, the step from which the trainer continued."""
    return min([version.step, *(went_on for _, went_on in ledger.state.branches[version.incarnation :])])


class Claims:
    """Assigns new groups and restarted trajectories to generators; every assignment is an event of the record."""

    def __init__(
        self, record: Record, curriculum: Curriculum, admission: Admission, waits: Waits, scoring: Scoring
    ) -> None:
        self._record, self._waits = record, waits
        self._curriculum, self._admission, self._scoring = curriculum, admission, scoring

    def answer(self, claim: Claim) -> Assignment | Wait:
        """The work for a claim, or why the generator has to wait."""
        record, state = self._record, self._record.ledger.state
        if claim.request_id in state.generators[claim.generator].given:
            return self._given_before(claim)
        who = f"generator {claim.generator}"
        if state.draining is not None:
            return self._waits.begin(who, WaitReason.DRAINED, f"no more prompts are issued ({state.draining})")
        restarted = self._restarted(claim)
        if not restarted and claim.only_moved:
            return Wait(WaitReason.ROOM, "the generator is full", record.clock.monotonic())
        if not restarted:
            why = self._admission.wait(record, claim.serving) or self._admission.disk_wait(record, state.n_samples)
        else:  # restarts need no admission; but a full journal must first remove the previous attempts
            why = self._admission.disk_wait(record, 0)
            why = why if record.journal.reclaims else None
        if why is not None:
            return self._waits.begin(who, *why)
        self._waits.end(who)
        generator = claim.generator, claim.incarnation
        if restarted:
            group_id, samples = restarted[0][0], tuple(sample for _, sample in restarted)
            record.add(events.Assigned(group_id, samples, *generator, claim.request_id))
            return self._assignment(group_id, samples)
        group_id, place = state.next_group_id, self._curriculum.next_place()
        row = self._curriculum.prompts.row(place)
        prompt, scorers = (row, self._curriculum.prompts.uids[row]), self._scoring.of_row(row)
        record.add(events.Issued(group_id, *prompt, *generator, claim.serving, claim.request_id, place, scorers))
        return self._assignment(group_id, tuple(range(state.n_samples)))

    def _given_before(self, claim: Claim) -> Assignment | Wait:
        ledger = self._record.ledger
        group_id, attempts = ledger.state.generators[claim.generator].given[claim.request_id]
        sender = Sender(claim.generator, claim.incarnation, 0)
        given = (TrajectoryId(group_id, sample, attempt) for sample, attempt in attempts.items())
        samples = tuple(of.sample for of in given if ledger.plays(sender, of))
        if samples:
            return self._assignment(group_id, samples)
        detail = f"claim {claim.request_id} was answered before, and its work is done or reassigned; send a new claim"
        return Wait(WaitReason.ANSWERED, detail, self._record.clock.monotonic())

    def _restarted(self, claim: Claim) -> list[Sample]:
        """The samples of one group that wait for a claim, and that this claim may get."""
        ledger, groups = self._record.ledger, self._record.ledger.state.groups
        end = self._admission.first_to_wait(ledger, claim.serving) if ledger.unassigned else 0
        may_begin = [of for of in ledger.unassigned if of[0] < end and groups[of[0]].admitted <= claim.serving]
        may_begin = [(o, s) for o, s in may_begin if groups[o].trajectories[s].moved or not claim.only_moved]
        first = min(may_begin, default=(0, 0))[0]
        return sorted(of for of in may_begin if of[0] == first)

    def _assignment(self, group_id: int, samples: tuple[int, ...]) -> Assignment:
        group, held = self._record.ledger.state.groups[group_id], self._record.store.of(group_id)
        attempts = tuple(group.trajectories[sample].attempt for sample in samples)
        moved = tuple(sample for sample in samples if group.trajectories[sample].moved)
        accepted = [held.steps_of(sample) for sample in samples] if held.steps else []
        nobody, ends = Sender("", 0, 0), ends_table(())
        steps = tuple(
            encode(StepGroup(nobody, concat(own), ends), may_deflate=False) if own else b"" for own in accepted
        )
        return Assignment(group_id, group.uid, group.row, samples, attempts, steps, moved)


FINAL = (WaitReason.DRAINED, WaitReason.ANSWERED)
"""Reasons to wait that no later event removes: a claim with such a reason is answered at once."""


@dataclass(frozen=True, slots=True, eq=False)
class WaitingClaim:
    """A claim, and the function that sends its answer."""

    claim: Claim
    most: int
    """Maximum number of groups in the claim's answer."""
    wait: Wait
    """The buffer's answer when the claim arrived."""
    deadline: float
    """Monotonic time in seconds at which the claim is answered with `wait`."""
    reply: Callable[[ClaimAnswer], None]


class WaitingClaims:
    """Claims that wait for a group, in order of arrival."""

    def __init__(self, ask: Callable[[Claim, int], ClaimAnswer]) -> None:
        """`ask`: returns the buffer's answer to a claim of up to a given number of groups."""
        self._ask = ask
        self._waiting: dict[WaitingClaim, None] = {}

    def answer(self, claim: Claim, most: int, deadline: float | None, reply: Callable[[ClaimAnswer], None]) -> None:
        """Answer a claim of up to `most` groups by calling `reply`, as soon as there is a group or at `deadline` (None:
        at once). No claim may have an earlier deadline than the claim before."""
        answer = self._ask(claim, most)
        if deadline is not None and isinstance(answer, Wait) and answer.reason not in FINAL:
            self._waiting[WaitingClaim(claim, most, answer, deadline, reply)] = None
        else:
            reply(answer)

    def look(self) -> None:
        """Answer the waiting claims for which there is now a group, in order of arrival."""
        blocked: PolicyVersion | None = None
        for waiting in list(self._waiting):
            serving = waiting.claim.serving
            if waiting not in self._waiting or (blocked is not None and serving <= blocked):
                continue  # a reply may have removed this claim
            answer = self._ask(waiting.claim, waiting.most)
            if isinstance(answer, Wait) and answer.reason not in FINAL:
                blocked = blocked if waiting.claim.only_moved else serving
            else:
                del self._waiting[waiting]
                waiting.reply(answer)

    def expire(self, now: float) -> None:
        """Answer every claim whose deadline has passed with its first `Wait`."""
        while self._waiting:
            waiting = next(iter(self._waiting))
            if waiting.deadline > now:
                return
            del self._waiting[waiting]
            waiting.reply(waiting.wait)

    def take(self) -> list[WaitingClaim]:
        """Remove and return all waiting claims, unanswered."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken
