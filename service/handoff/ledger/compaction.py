"""Makes room in the journal: copies needed frames of the oldest segments to the end, then removes the segments.

    before   | steps of 7, steps of 8 | steps of 9 | ...                 8 was filtered, 7 and 9 wait to be trained
    after                             | steps of 9 | ... | steps of 7 | snapshot

Without copies, one needed group would keep all later segments too, and the number of filtered groups and replaced
attempts in them has no bound.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from service.columns import select
from service.handoff.journal.disk import Buffer
from service.handoff.ledger import events
from service.handoff.ledger.accept import items_by_trajectory
from service.handoff.ledger.ledger import attempts_of
from service.handoff.ledger.record import Record
from service.handoff.ledger.replaying import message_of
from service.handoff.steps.tables import ends_table
from service.handoff.steps.wire import encode
from service.types import StepGroup, TrajectoryEnd


def make_room(record: Record, wanted: int) -> None:
    """Mark the oldest segments that no group needs for removal; the next sync of the journal removes them.

    `wanted`: number of bytes to free. If these segments have fewer bytes, the needed frames of the next segment are
    copied to the end of the journal, so that it can be removed too.
    """
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
    """The step groups and scores between two positions of the journal that some group needs."""
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
