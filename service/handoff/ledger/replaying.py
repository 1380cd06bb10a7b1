"""Replaying the journal: the record as its frames leave it, and steps that are read back into memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from service.clock import Clock
from service.errors import JournalError
from service.handoff.batches.batch import CompleteGroup
from service.handoff.group_bytes import ITEM_BYTES, table_bytes
from service.handoff.journal.frames import Frame
from service.handoff.journal.journal import Journal
from service.handoff.ledger import events
from service.handoff.ledger.accept import items_by_trajectory, new_content
from service.handoff.ledger.ledger import Ledger
from service.handoff.ledger.lifecycle import USED, GroupState
from service.handoff.ledger.record import Record, Store, cut
from service.handoff.steps.validate import Limits
from service.handoff.steps.wire import decode
from service.types import Refusal, StepGroup


def opened_record(opened: events.Opened, limits: Limits, journal: Journal, clock: Clock) -> Record:
    """The record of a journal's frames; of an empty journal, one that begins with `opened`.

    Raises:
        JournalError: the journal is damaged, or holds another run.
    """
    record, snapshot = Record(opened.n_samples, limits, journal, clock), None
    for frame in journal.replay():
        if frame.kind == events.SNAPSHOT:
            snapshot = frame
    if snapshot is not None:
        _restore(record, snapshot)
    elif journal.start > 0:
        raise JournalError(f"{journal.folder} begins at position {journal.start} and has no snapshot")
    for frame in journal.read(journal.start if snapshot is None else snapshot.end):
        apply_frame(record, frame)
    begun = record.ledger.state.opened
    if begun is None:
        record.add(opened)
    elif begun != opened:
        raise JournalError(f"{journal.folder} holds another run: it began with {begun}, this one is {opened}")
    return record


def apply_frame(record: Record, frame: Frame) -> None:
    """Apply a frame of the journal.

    Raises:
        JournalError: its step group was accepted, but is refused now.
    """
    if frame.kind == events.EVENT:
        record.apply(events.decode(frame.payload))
    elif frame.kind == events.STEPS:
        message = _message(frame, record.limits)
        new = new_content(record.ledger, record.store, message)
        if isinstance(new, Refusal):
            raise _refused_now(frame, new)
        record.apply_steps(message, new.additions, frame.position, frame.end)


def complete_group(record: Record, group_id: int) -> CompleteGroup:
    """The steps and ends of a complete group; read back from the journal if an optimizer step that used it was undone.

    Raises:
        JournalError: the journal no longer holds them.
    """
    if group_id not in record.store:
        whole, groups = (GroupState.COMPLETE, GroupState.LEASED), record.ledger.state.groups.items()
        record.journal.sync()
        missing = [other for other, group in groups if group.state in whole and other not in record.store]
        _fetch_groups(record, missing, record.journal.synced)
        if group_id not in record.store:
            raise JournalError(f"{record.journal.folder} no longer holds group {group_id}, which waits to be trained")
    return CompleteGroup(group_id, record.ledger.state.groups[group_id].uid, *record.store.whole(group_id))


def fetch(store: Store, attempts: Mapping[int, Sequence[int]], frames: Iterable[Frame], limits: Limits) -> None:
    """Add the steps and ends of some groups to a store, each once.

    `attempts`: by group_id, the attempt of each sample that counts.
    """
    seen: set[tuple[int, int, int]] = set()
    for frame in frames:
        if frame.kind == events.STEPS:
            message = _message(frame, limits)
            index = message.steps.index_K.tolist()
            for of, (items, ends) in items_by_trajectory(message).items():
                if of.group_id in attempts and attempts[of.group_id][of.sample] == of.attempt:
                    keys = {(of.group_id, of.sample, index[k]): k for k in reversed(items)}
                    new = sorted(k for key, k in keys.items() if key not in seen)  # the first of each, as when it came
                    seen |= keys.keys()
                    steps = cut(message.steps, new)
                    n_bytes = (table_bytes(steps) if steps is not None else 0) + ITEM_BYTES * len(ends)
                    store.add(of.group_id, steps, ends, n_bytes)


def _restore(record: Record, snapshot: Frame) -> None:
    """Put the record into the state of a snapshot, as if every trajectory had made progress now."""
    ledger = record.ledger = Ledger.restored(snapshot.payload)
    record.snapshot_end = snapshot.end
    now, groups = record.clock.monotonic(), ledger.state.groups
    for held in ledger.held.values():
        record.last_progress.update(dict.fromkeys(sorted(held), now))
    record.leased_at = dict.fromkeys(ledger.state.leases, now)
    record.issued_at.update(dict.fromkeys(sorted(groups), now))
    _fetch_groups(
        record, [group_id for group_id, group in groups.items() if group.state not in USED], snapshot.position
    )


def _fetch_groups(record: Record, group_ids: Sequence[int], stop: int) -> None:
    """Fetch groups from the part of the journal before position `stop`."""
    groups = {group_id: record.ledger.state.groups[group_id] for group_id in group_ids}
    starts = [group.first_position for group in groups.values() if group.first_position is not None]
    frames = record.journal.read(min(starts, default=stop), stop)
    attempts = {group_id: group.current_attempts for group_id, group in groups.items()}
    fetch(record.store, attempts, frames, record.limits)


def _message(frame: Frame, limits: Limits) -> StepGroup:
    """The step group of a frame."""
    message = decode(frame.payload, limits)
    if isinstance(message, Refusal):
        raise _refused_now(frame, message)
    return message


def _refused_now(frame: Frame, refused: Refusal) -> JournalError:
    return JournalError(f"position {frame.position} of the journal was accepted, but is refused: {refused}")
