"""Admission: limits the unfinished work, and so the staleness of tokens and the memory and disk space of their steps.

Groups get numbered slots in the order in which they are admitted; the slot of a group that ends untrained is given to
a later group. With mini-batches of B groups, slot s belongs to mini-batch floor(s / B), and is admitted once the
engine of the claiming generator serves version floor(s / B) - lookahead:

    B = 2, lookahead = 1, the engine serves version 0:  slots 0 1 | 2 3 are admitted, slot 4 waits for version 1
"""

from __future__ import annotations

from itertools import islice

from service.handoff.buffer_settings import BufferSettings
from service.handoff.group_bytes import EVENT_BYTES, TEACHER_BYTES
from service.handoff.journal.journal import Journal
from service.handoff.ledger.ledger import Ledger
from service.handoff.ledger.record import Record
from service.handoff.ledger.replaying import make_room
from service.handoff.verbs import WaitReason
from service.types import PolicyVersion


class Admission:
    """Decides whether one more group may be issued, or has to wait for newer weights, for memory or for disk space."""

    def __init__(self, settings: BufferSettings) -> None:
        self._settings, self._worst = settings, settings.worst

    def reserved(self, record: Record) -> int:
        """Bytes of the accepted steps, also those to be read back, and of what unfinished trajectories may add."""
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
        """Why an engine that serves version `serving` has to wait for one more group, with a text; None if not."""
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
    """The optimizer step of a version, or the one from which the trainer continued if it was undone."""
    return min([version.step, *(went_on for _, went_on in ledger.state.branches[version.incarnation :])])
