"""Leases: which groups the next mini-batch takes, and when a lease ends; and who has to wait at present, and for what.

begin() -> BatchJob -- run() --> BatchResult -> finish() -> MiniBatch, and the event Leased

The job may run in another thread; the mini-batch is leased after it. A lease ends with a commit, or it is released: by
its trainer, by a new trainer, or at its deadline (`buffer.lease_deadline`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from service.handoff.batches.batch import BatchResult, BatchSettings, form_mini_batch, formed
from service.handoff.batches.batch_metrics import group_stats, reward_metrics
from service.handoff.batches.estimators import NoAdvantage
from service.handoff.buffer_settings import BufferSettings
from service.handoff.ledger import events
from service.handoff.ledger.events import UNFINISHED, GroupState, GroupStats
from service.handoff.ledger.record import Record
from service.handoff.ledger.replaying import load_groups
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.verbs import Wait, Waiting, WaitReason
from service.types import MiniBatch, PolicyVersion, RefusalReason

SILENT_FRACTION = 0.5
"""Fraction of the step deadline after which the status names a silent trajectory."""
FRUITLESS_GROUPS, FRUITLESS_MINI_BATCHES = 512, 16
"""No mini-batch is expected after this many filtered groups in a row: the first number, or the groups of the second
number of mini-batches if these are more. Such a series is rare even if one group in a hundred passes the filters."""


@dataclass(frozen=True)
class BatchJob:
    """The inputs from which a mini-batch is formed, so that `run` can be called in another thread."""

    lease: int
    trainer_incarnation: int
    version: PolicyVersion
    """The newest version when the job began; if a newer version exists after the job, the mini-batch is discarded."""
    groups: list[CompleteGroup]
    history: VersionHistory
    settings: BatchSettings

    def run(self) -> BatchResult | list[int]:
        """Form the mini-batch; return the groups to which the estimator gives no finite advantage, if there are any."""
        try:
            return formed(self.lease, self.groups, self.history, self.settings)
        except NoAdvantage as error:
            group_id_G = [group.group_id for group in self.groups for _ in range(len(group.ends))]
            return list(dict.fromkeys(group_id_G[g] for g in error.trajectories))


class Leases:
    """Leases mini-batches of complete groups, one at a time."""

    def __init__(self, settings: BufferSettings, record: Record) -> None:
        self._settings, self._record = settings, record
        self._newest: MiniBatch | None = None

    def begin(self, trainer_incarnation: int) -> BatchJob:
        """The inputs of the next mini-batch, for which `Waits.lease_wait` has found no reason to wait."""
        ledger, size = self._record.ledger, self._settings.mini_batch_size
        ready = ledger.slots if self._settings.order == "strict" else [group_id for _, group_id in ledger.finished]
        return self._job(ledger.state.next_lease, trainer_incarnation, tuple(islice(ready, size)))

    def finish(self, job: BatchJob, made: BatchResult) -> MiniBatch | None:
        """Lease the mini-batch that the job formed; None if the version or a group changed while it ran."""
        ledger = self._record.ledger
        groups = ledger.state.groups
        complete = all(o in groups and groups[o].state is GroupState.COMPLETE for o in made.batch.groups)
        if not complete or (job.lease, job.version) != (ledger.state.next_lease, ledger.history.current):
            return None
        # Filters may have removed more groups while the job ran.
        self._newest = with_filtered(made.batch, ledger.state.filtered)
        starts_P = np.searchsorted(made.batch.prompt_of_trajectory_G, np.arange(1, len(job.groups)))
        loss = tuple(tuple(tokens_G.tolist()) for tokens_G in np.split(made.batch.loss_tokens_G, starts_P))
        stale = tuple(int(tokens_G.sum()) for tokens_G in np.split(made.stale_G, starts_P))
        tokens = loss, stale, made.untrained_P
        self._record.add(events.Leased(job.lease, job.trainer_incarnation, made.batch.groups, *tokens))
        return self._newest

    def again(self, lease: int) -> MiniBatch:
        """The mini-batch of the open lease; after a restart of the buffer, it is formed again."""
        if self._newest is None or self._newest.lease != lease:
            held = self._record.ledger.state.leases[lease]
            job = self._job(lease, held.trainer_incarnation, held.group_ids)
            batch = form_mini_batch(lease, job.groups, job.history, job.settings)
            self._newest = with_filtered(batch, held.filtered)
        return self._newest

    def release(self, lease: int, reason: str) -> None:
        """Release an open lease; refuse its groups after `buffer.max_lease_attempts` leases."""
        ledger = self._record.ledger
        group_ids = ledger.state.leases[lease].group_ids
        self._record.add(events.Released(lease, reason))
        for group_id in group_ids:
            if ledger.state.groups[group_id].lease_count >= self._settings.max_lease_attempts:
                self._record.add(events.Ended(group_id, GroupState.REFUSED, RefusalReason.MAX_LEASE_ATTEMPTS))

    def release_overdue(self) -> None:
        """Release every lease that is older than the deadline."""
        for lease, since in list(self._record.ledger.leased_at.items()):
            if self._record.clock.monotonic() - since >= self._settings.lease_deadline:
                self.release(lease, "deadline")

    def _job(self, lease: int, trainer_incarnation: int, group_ids: tuple[int, ...]) -> BatchJob:
        history = self._record.ledger.history
        groups = load_groups(self._record, group_ids)
        return BatchJob(lease, trainer_incarnation, history.current, groups, history, self._settings.batches)


def with_filtered(batch: MiniBatch, filtered: GroupStats) -> MiniBatch:
    """The mini-batch, with reward metrics that also cover the groups filtered since the previous mini-batch, and with
    the cost of resampling: the sampled tokens per kept token, which is 2 if filters removed half of them."""
    metrics = reward_metrics(group_stats(batch.return_G, batch.prompt_of_trajectory_G), filtered)
    sampled = batch.metrics["tokens/sampled"]
    metrics["generate/filtered_tokens"] = float(filtered.tokens)
    metrics["generate/tokens_per_kept_token"] = (sampled + filtered.tokens) / max(sampled, 1.0)
    return replace(batch, metrics=batch.metrics | metrics)


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
        """Everyone who has to wait, and the longest silent trajectory if its silence exceeds `SILENT_FRACTION`."""
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
