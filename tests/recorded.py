"""Forms a run's mini-batches again from its journal, bit by bit."""

import copy
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from service.clock import SystemClock
from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.journal.disk import Disk
from service.handoff.journal.journal import Frame, Journal
from service.handoff.leases import with_filtered
from service.handoff.ledger import events
from service.handoff.ledger.record import Record, Store
from service.handoff.ledger.replaying import apply_frame, fetch
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.steps.values import Limits
from service.types import MiniBatch

KEPT = "removed"


class KeepingDisk(Disk):
    """A disk that moves a removed segment to a folder."""

    def remove(self, path: Path) -> None:
        (path.parent / KEPT).mkdir(exist_ok=True)
        path.rename(path.parent / KEPT / path.name)


class Recorded(NamedTuple):
    """The data from which a mini-batch was formed."""

    lease: int
    groups: list[CompleteGroup]
    history: VersionHistory
    filtered: events.GroupStats


def replayed(limits: Limits, settings: BatchSettings, folder: Path, step: int) -> MiniBatch:
    """Form the mini-batch of an optimizer step again; of a step that was taken more than once, the last one."""
    found = recorded(limits, folder, step)
    return with_filtered(form_mini_batch(found.lease, found.groups, found.history, settings), found.filtered)


def recorded(limits: Limits, folder: Path, step: int) -> Recorded:
    """The data from which the mini-batch of an optimizer step was formed. The journal in `folder` has everything since
    the run began, in part in the folder of a `KeepingDisk`."""
    clock = SystemClock()
    record = Record(limits, Journal(folder, clock), clock)
    state, history = record.ledger.state, record.ledger.history
    leased = found = None
    frames = _frames(folder)
    for frame in frames:
        event = events.decode(frame.payload) if frame.kind == events.EVENT else None
        if isinstance(event, events.Leased):
            groups = {group_id: state.groups[group_id] for group_id in event.group_ids}
            leased = event.lease, groups, copy.deepcopy(history), state.filtered
        elif isinstance(event, events.Committed) and event.version.step == step:
            found = leased
        apply_frame(record, frame)
    assert found is not None, f"no step {step}"
    lease, groups, history, filtered = found
    store = Store()
    fetch(store, groups, frames)
    whole = [CompleteGroup(group_id, group.uid, *store.whole(group_id)) for group_id, group in groups.items()]
    return Recorded(lease, whole, history, filtered)


def _frames(folder: Path) -> list[Frame]:
    with tempfile.TemporaryDirectory() as copied:
        for path in [*folder.glob("*.journal"), *folder.glob(f"{KEPT}/*.journal")]:
            shutil.copy(path, copied)
        journal = Journal(Path(copied), SystemClock())
        frames = list(journal.replay())
        journal.close()
    return frames
