"""Reads the journal: restores the record, reads steps back into memory, and makes room in the journal.

To make room, the needed frames of the oldest segments are copied to the end, and the segments removed:

    before   | steps of 7, steps of 8 | steps of 9 | ...                 8 was filtered, 7 and 9 wait to be trained
    after                             | steps of 9 | ... | steps of 7 | snapshot

Without copies, one needed group would keep all later segments too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from service.clock import Clock
from service.columns import select
from service.errors import JournalError, UserError
from service.handoff.journal.disk import Buffer
from service.handoff.journal.journal import Frame, Journal, first_frame
from service.handoff.ledger import events
from service.handoff.ledger.accept import items_by_trajectory, new_content
from service.handoff.ledger.events import USED
from service.handoff.ledger.ledger import Ledger, attempts_of
from service.handoff.ledger.record import GroupData, Record, Store, expert_bytes
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import Group, State
from service.handoff.steps.tables import ends_table
from service.handoff.steps.values import Limits
from service.handoff.steps.wire import decode, encode
from service.types import Refusal, StepGroup, TrajectoryEnd

_decoder = msgspec.msgpack.Decoder(State)


def opened_record(opened: events.Opened, limits: Limits, journal: Journal, clock: Clock) -> Record:
    """The record that results from a journal's frames; an empty journal begins with `opened`.

    Raises a JournalError if the journal is damaged, a UserError if its run began with other rows or settings.
    """
    record, oldest, snapshot = Record(limits, journal, clock), None, None
    for frame in journal.replay():
        oldest = oldest or frame
        if frame.kind == events.SNAPSHOT:
            snapshot = frame
    if oldest is not None:
        _check_opening(oldest, opened, journal.folder)
    if snapshot is not None:
        ledger = record.ledger = Ledger(_decoder.decode(snapshot.payload), clock.monotonic())
        record.snapshot_end, record.store.expert_bytes = snapshot.end, expert_bytes(ledger, record.limits.routing)
        unused = [o for o, group in ledger.state.groups.items() if group.state not in USED]
        _fetch_groups(record, unused, snapshot.position)
    elif journal.start > 0:
        raise JournalError(f"{journal.folder} begins at position {journal.start} and has no snapshot")
    for frame in journal.read(journal.start if snapshot is None else snapshot.end):
        apply_frame(record, frame)
    if record.ledger.state.opened is None:
        record.add(opened)
    return record


def check_begun(folder: Path, opened: events.Opened) -> int:
    """Raise a UserError if the run whose journal is in `folder`, if any, began with other rows or settings. Returns the
    position at which the files end; the journal may end before, because files reserve space."""
    files = sorted((int(path.stem), path) for path in folder.glob("*.journal") if path.stem.isdecimal())
    if files and (frame := first_frame(files[0][1])) is not None:
        _check_opening(frame, opened, folder)
    return max((start + path.stat().st_size for start, path in files), default=0)


def _check_opening(oldest: Frame, opened: events.Opened, folder: Path) -> None:
    """`oldest`: the first frame that the journal still has."""
    is_snapshot = oldest.kind == events.SNAPSHOT
    begun = _decoder.decode(oldest.payload).opened if is_snapshot else events.decode(oldest.payload)
    if not isinstance(begun, events.Opened):
        return
    remedy = f"set it back, or begin a new run under another run.name ({folder} continues as it began)"
    for name in begun.settings | opened.settings:
        if (then := begun.settings.get(name)) != (now := opened.settings.get(name)):
            raise UserError(f"{name}: it is {now}, but was {then} when this run began, and cannot change: {remedy}")
    if begun.rows != opened.rows:
        raise UserError(f"data.train: the dataset has other rows than when this run began: {remedy}")


def apply_frame(record: Record, frame: Frame) -> None:
    """Apply a frame of the journal; raises a JournalError if its step group would be refused now."""
    if frame.kind in (events.EVENT, events.SCORES):
        record.apply(events.decode(frame.payload))
    elif frame.kind == events.STEPS:
        message = message_of(frame)
        new = new_content(record.ledger, record.store, message)
        if isinstance(new, Refusal):
            raise _refused_now(frame, new)
        record.apply_steps(message, new.additions, frame.position)


def load_groups(record: Record, group_ids: Sequence[int]) -> list[CompleteGroup]:
    """Complete groups, read back if their optimizer step was undone; raises a JournalError if a group is gone."""
    if missing := [group_id for group_id in group_ids if group_id not in record.store.held]:
        record.journal.sync()
        _fetch_groups(record, missing, record.journal.synced)
    for group_id in missing:
        if group_id not in record.store.held:
            raise JournalError(f"{record.journal.folder} no longer holds group {group_id}, which waits to be trained")
    return [record.complete_group(group_id) for group_id in group_ids]


def fetch(store: Store, groups: Mapping[int, Group], frames: Iterable[Frame]) -> None:
    """Add the accepted steps, end records and scores of groups in `frames` to a store, until it has all of them."""
    attempts = {group_id: attempts_of(group) for group_id, group in groups.items()}
    unfinished: set[tuple[int, int | str]] = {
        (o, sample) for o, of_group in attempts.items() for sample, at in enumerate(of_group) if at >= 0
    }
    unfinished |= {(o, scorer) for o, group in groups.items() for scorer in group.scored}
    for frame in frames:
        if not unfinished:
            break
        if frame.kind == events.SCORES:
            score = events.scored_from(frame.payload)
            if (score.group_id, score.scorer) in unfinished:
                unfinished.discard((score.group_id, score.scorer))
                store.add_score(score)
        if frame.kind in (events.STEPS, events.COPIED):
            message = message_of(frame)
            index = message.steps.index_K.tolist()
            for of, (items, ends) in items_by_trajectory(message).items():
                if of.group_id in attempts and attempts[of.group_id][of.sample] == of.attempt:
                    held = store.held.setdefault(of.group_id, GroupData())
                    there = held.places.setdefault(of.sample, {})
                    new = {index[k]: k for k in reversed(items) if index[k] not in there}  # the first copy of each step
                    ends = [end for end in ends if of.sample not in held.ends]
                    store.add(of.group_id, message.steps, sorted(new.values()), ends)
                    if of.sample in held.ends and len(there) == held.ends[of.sample].n_steps:
                        unfinished.discard(of[:2])


def _fetch_groups(record: Record, group_ids: Sequence[int], stop: int) -> None:
    groups = {group_id: record.ledger.state.groups[group_id] for group_id in group_ids}
    starts = [group.first_position for group in groups.values() if group.first_position is not None]
    fetch(record.store, groups, record.journal.read(min(starts, default=stop), stop))


def message_of(frame: Frame) -> StepGroup:
    """The step group in a frame."""
    message = decode(frame.payload, None)
    if isinstance(message, Refusal):
        raise _refused_now(frame, message)
    return message


def _refused_now(frame: Frame, refused: Refusal) -> JournalError:
    return JournalError(f"position {frame.position} of the journal was accepted, but is refused: {refused}")


def make_room(record: Record, wanted: int) -> None:
    """Mark the oldest segments that no group needs for removal. If they have fewer than `wanted` bytes, the needed
    frames of the next segment are copied to the end of the journal, so that this segment can be removed too."""
    journal = record.journal
    if journal.reclaims:
        return
    cutoff, needed_from, gained = journal.start, record.needed_from(), 0
    copies: list[tuple[int, Buffer]] = []
    for end in journal.ends:
        if end == record.snapshot_end:  # the segment holds the newest snapshot and nothing else
            break
        if end > needed_from:
            if copies or gained >= wanted:
                break
            copies = list(_needed(record, cutoff, end))
        gained += end - cutoff - sum(len(payload) for _, payload in copies)
        cutoff = end
    if cutoff == journal.start:
        return
    for kind, payload in copies:
        journal.append(kind, payload)
    for group in record.ledger.state.groups.values():
        if group.first_position is not None:
            group.first_position = max(group.first_position, cutoff)
    record.begin_segment()


def _needed(record: Record, start: int, stop: int) -> Iterator[tuple[int, Buffer]]:
    groups = record.ledger.state.groups
    for frame in record.journal.read(start, stop):
        if frame.kind == events.SCORES and events.scored_from(frame.payload).group_id in groups:
            yield events.SCORES, frame.payload
        if frame.kind not in (events.STEPS, events.COPIED):
            continue
        message, kept, ends = message_of(frame), list[int](), list[TrajectoryEnd]()
        for of, (items, ends_of) in items_by_trajectory(message).items():
            group = groups.get(of.group_id)
            if group is not None and attempts_of(group)[of.sample] == of.attempt:
                kept += items
                ends += ends_of
        if len(kept) == len(message.steps) and len(ends) == len(message.ends):
            yield events.COPIED, frame.payload
        elif kept or ends:
            steps = select(message.steps, np.array(sorted(kept), np.int64))
            yield events.COPIED, encode(StepGroup(message.sender, steps, ends_table(ends)))
