"""Replays a recorded run: forms its mini-batches again from its journal, bitwise equal."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from service.clock import SystemClock
from service.errors import JournalError, UserError, in_one_line
from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.journal.journal import KEPT, Frame, Journal, frames_in, segment_name
from service.handoff.leases import with_filtered
from service.handoff.ledger import events
from service.handoff.ledger.record import Record, Store
from service.handoff.ledger.replaying import apply_frame, fetch
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.versions import VersionHistory
from service.handoff.steps.limits import Limits
from service.types import MiniBatch


class Recorded(NamedTuple):
    """The data from which a mini-batch was formed."""

    lease: int
    groups: list[CompleteGroup]
    history: VersionHistory
    filtered: events.GroupStats


def replayed(limits: Limits, settings: BatchSettings, folder: Path, step: int) -> MiniBatch:
    """Form the mini-batch of optimizer step `step` again. If a trainer took the step more than once, this is the
    mini-batch that was used last.

    Raises:
        UserError: the journal has no such step, is damaged, was not written by a run, or lacks its first frames.
    """
    try:
        found = recorded(limits, folder, step)
    except JournalError as error:
        raise UserError(str(error)) from error
    except (ValueError, LookupError, ArithmeticError) as error:  # a frame that is whole and that no run wrote
        why = in_one_line(f"{type(error).__name__}: {error}")
        raise UserError(f"{folder}: these frames are of no run ({why}); bring the journal back from a copy") from error
    batch = form_mini_batch(found.lease, found.groups, found.history, settings)
    return with_filtered(batch, found.filtered)


def recorded(limits: Limits, folder: Path, step: int) -> Recorded:
    """The recorded data from which the mini-batch of optimizer step `step` was formed.

    Raises:
        UserError: the journal has no such step, or its first frames were removed.
    """
    clock = SystemClock()
    record = Record(limits, Journal(folder, clock), clock)
    state, history = record.ledger.state, record.ledger.history
    leased = found = None
    for frame in _recorded(folder):
        event = events.decode(frame.payload) if frame.kind == events.EVENT else None
        if isinstance(event, events.Leased):
            groups = {group_id: state.groups[group_id] for group_id in event.group_ids}
            leased = event.lease, groups, copy.deepcopy(history), state.filtered
        elif isinstance(event, events.Committed) and event.version.step == step:
            found = leased
        apply_frame(record, frame)
    if found is None:
        raise UserError(f"{folder} holds no optimizer step {step}")
    lease, groups, history, filtered = found
    store = Store()
    fetch(store, groups, _recorded(folder))
    whole = [CompleteGroup(group_id, group.uid, *store.whole(group_id)) for group_id, group in groups.items()]
    return Recorded(lease, whole, history, filtered)


def _recorded(folder: Path) -> Iterator[Frame]:
    """All frames (records) of a journal that has everything since the run began; no file is changed.

    Raises:
        UserError: the journal, or a segment of it, is missing.
    """
    places = folder, folder / KEPT  # a running buffer moves segments from the first to the second
    left = {path.name for place in places for path in place.glob("*.journal")}
    if not left:
        raise UserError(f"{folder} holds no journal")
    position, end = -1, 0
    while end > position:  # a segment has frames
        position, name = end, segment_name(end)
        for place in places:
            try:
                for frame in frames_in(place / name):
                    yield frame
                    end = frame.end
                left.discard(name)
                break
            except FileNotFoundError:
                continue
        else:
            if name in left:
                raise UserError(f"{folder}: {name} cannot be opened, it is a link to a file that is missing")
    if left:
        lacks = f"no segment begins at position {position}, where {min(left)} comes next"
        raise UserError(f"{folder}: {lacks}; buffer.record: true keeps everything, unless a file was damaged since")
