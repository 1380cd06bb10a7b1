"""Who has to wait at present, for what, and since when."""

from __future__ import annotations

from itertools import islice

from service.handoff.buffer_settings import BufferSettings
from service.handoff.ledger.events import UNFINISHED, GroupState, GroupStats
from service.handoff.ledger.record import Record
from service.handoff.verbs import Wait, Waiting, WaitReason

SILENT_FRACTION = 0.5
"""Fraction of the step deadline after which the status names a silent trajectory."""


FRUITLESS_GROUPS, FRUITLESS_MINI_BATCHES = 512, 16
"""Once this many groups (and as many as in this many mini-batches) in a row were filtered, no mini-batch is expected;
such a series is rare even if one group in a hundred passes the filters."""


class Waits:
    """The generators, the trainer and the journal that have to wait at present, each with the reason in words."""

    def __init__(self, settings: BufferSettings, record: Record) -> None:
        self._settings, self._record, self._clock = settings, record, record.clock
        self._waits: dict[str, Wait] = {}

    def begin(self, who: str, reason: WaitReason, detail: str) -> Wait:
        """Record that `who` has to wait. If `who` already waits for this reason, the start time stays the same."""
        known = self._waits.get(who)
        since = known.since if known is not None and known.reason is reason else self._clock.monotonic()
        self._waits[who] = Wait(reason, detail, since)
        return self._waits[who]

    def end(self, who: str) -> None:
        """Record that `who` does not have to wait any more."""
        self._waits.pop(who, None)

    def current(self) -> tuple[Waiting, ...]:
        """Everyone who has to wait, and the trajectory that has been silent longest, beyond `SILENT_FRACTION`."""
        now = self._clock.monotonic()
        waits = [Waiting(who, str(w.reason), w.detail, now - w.since) for who, w in self._waits.items()]
        for (group_id, sample), since in islice(self._record.ledger.since.items(), 1):
            if now - since >= SILENT_FRACTION * self._settings.attempts.step_deadline:
                who, detail = f"group={group_id}/sample={sample}", self._silence(group_id, sample)
                waits.append(Waiting(who, "silent", detail, now - since))
        return tuple(waits)

    def lease_wait(self) -> tuple[WaitReason, str] | None:
        """Why no mini-batch can be leased, and the reason in words; None if one can."""
        ledger, size = self._record.ledger, self._settings.mini_batch_size
        complete = len(ledger.finished)
        growing = ledger.in_state[GroupState.ISSUED] + ledger.in_state[GroupState.OPEN] + len(ledger.scoring)
        if ledger.state.draining is not None and complete + growing < size:
            return WaitReason.DRAINED, f"{complete + growing} groups are left, a mini-batch takes {size}"
        filtered = describe_filtered(ledger.state.filtered)
        if not complete and ledger.state.filtered.groups >= max(FRUITLESS_GROUPS, FRUITLESS_MINI_BATCHES * size):
            return WaitReason.FILTERED, filtered
        if self._settings.order == "strict":
            return self._slot_wait(size)
        if complete < size:
            detail = f"{complete} of {size} groups are complete{self._unscored()}{f'; {filtered}' if filtered else ''}"
            for longest in islice(ledger.since, 1):
                detail += f"; longest silent is {self._silence(*longest)}"
            return WaitReason.GROUPS, detail
        return None

    def _slot_wait(self, size: int) -> tuple[WaitReason, str] | None:
        ledger = self._record.ledger
        for place, group_id in zip(range(size), ledger.slots, strict=False):
            group = ledger.state.groups[group_id]
            if group.state is GroupState.SCORING:
                return WaitReason.SLOT, f"slot {place} of {size}: group={group_id} waits for {', '.join(group.awaited)}"
            if group.state in UNFINISHED:
                sample = next(s for s, trajectory in enumerate(group.trajectories) if not trajectory.complete)
                return WaitReason.SLOT, f"slot {place} of {size}: {self._silence(group_id, sample)}"
        if len(ledger.slots) < size:
            return WaitReason.SLOT, f"{len(ledger.slots)} of {size} slots are issued"
        return None

    def _unscored(self) -> str:
        """Text such as `, 3 wait for a scorer (judge)`; empty if no group waits for a scorer."""
        ledger = self._record.ledger
        awaited = sorted({name for group_id in ledger.scoring for name in ledger.state.groups[group_id].awaited})
        return f", {len(ledger.scoring)} wait for a scorer ({', '.join(awaited)})" if awaited else ""

    def _silence(self, group_id: int, sample: int) -> str:
        trajectory = self._record.ledger.state.groups[group_id].trajectories[sample]
        since = self._record.ledger.since.get((group_id, sample))
        seconds = "" if since is None else f", silent for {self._clock.monotonic() - since:.0f} s"
        where = "waiting for a claim" if trajectory.generator is None else f"on {trajectory.generator}"
        steps = len(trajectory.indices)
        return f"group={group_id}/sample={sample}/attempt={trajectory.attempt} after {steps} steps {where}{seconds}"


def describe_filtered(filtered: GroupStats) -> str:
    """Text such as `591 groups finished, all filtered: every return was 0.0`; empty if no group was filtered."""
    if not filtered.groups:
        return ""
    if filtered.zeros == filtered.groups or filtered.ones == filtered.groups:
        why = f"every return was {0.0 if filtered.zeros else 1.0}"
    elif filtered.flat == filtered.groups:
        why = "the returns of each group were all the same"
    else:
        why = "the returns of a group were all the same, or too many of its trajectories over-long"
    return f"{filtered.groups} groups finished, all filtered: {why}"
