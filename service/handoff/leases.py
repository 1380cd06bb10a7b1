"""Leases: which groups the next mini-batch takes, and when a lease ends.

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
from service.handoff.ledger.events import GroupState
from service.handoff.ledger.record import Record
from service.handoff.ledger.replaying import load_groups
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.types import MiniBatch, PolicyVersion, RefusalReason


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
        """The inputs of the next mini-batch; raises a ValueError if a group is not complete, so that `lease` does not
        form mini-batches for ever."""
        ledger, size = self._record.ledger, self._settings.mini_batch_size
        ready = ledger.slots if self._settings.order == "strict" else [group_id for _, group_id in ledger.finished]
        state, group_ids = ledger.state, tuple(islice(ready, size))
        for group_id in group_ids:
            if state.groups[group_id].state is not GroupState.COMPLETE:
                raise ValueError(f"group {group_id} is to be leased and is {state.groups[group_id].state}")
        return self._job(state.next_lease, trainer_incarnation, group_ids)

    def finish(self, job: BatchJob, made: BatchResult) -> MiniBatch | None:
        """Lease the mini-batch that the job formed, and return it; None if the newest version or one of the groups
        changed while the job ran."""
        ledger = self._record.ledger
        groups = ledger.state.groups
        if (job.lease, job.version) != (ledger.state.next_lease, ledger.history.current):
            return None
        for group in job.groups:
            if group.group_id not in groups or groups[group.group_id].state is not GroupState.COMPLETE:
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
        now = self._record.clock.monotonic()
        for lease, since in list(self._record.ledger.leased_at.items()):
            if now - since >= self._settings.lease_deadline:
                self.release(lease, "deadline")

    def _job(self, lease: int, trainer_incarnation: int, group_ids: tuple[int, ...]) -> BatchJob:
        history = self._record.ledger.history
        groups = load_groups(self._record, group_ids)
        return BatchJob(lease, trainer_incarnation, history.current, groups, history, self._settings.batches)


def with_filtered(batch: MiniBatch, filtered: events.GroupStats) -> MiniBatch:
    """The mini-batch, with reward metrics that also cover the groups filtered since the previous mini-batch, and with
    the cost of resampling: 2 tokens per kept token if filters removed half of all."""
    metrics = reward_metrics(group_stats(batch.return_G, batch.prompt_of_trajectory_G), filtered)
    sampled = batch.metrics["tokens/sampled"]
    cost = {
        "generate/filtered_tokens": float(filtered.tokens),
        "generate/tokens_per_kept_token": (sampled + filtered.tokens) / max(sampled, 1.0),
    }
    return replace(batch, metrics=batch.metrics | metrics | cost)
