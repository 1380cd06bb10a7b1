"""Forming the open lease's mini-batch, and what becomes of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from service.config.tree import Config
from service.handoff.batches.batch import BatchSettings, CompleteGroup, form_mini_batch
from service.handoff.batches.score import NotScored, estimator_named
from service.handoff.ledger import events
from service.handoff.ledger.lifecycle import GroupState
from service.handoff.ledger.record import Record
from service.handoff.ledger.state import FilteredStats
from service.handoff.ledger.versions import VersionHistory
from service.types import MiniBatch, PolicyVersion, Steps


class Formed(NamedTuple):
    """A mini-batch with each of its groups' tokens by what becomes of them."""

    batch: MiniBatch
    loss_tokens: tuple[tuple[int, ...], ...]
    """[P] by trajectory, tokens that carry loss."""
    stale_tokens: tuple[int, ...]
    """[P] tokens that are too old to."""

    def leased(self, trainer_incarnation: int) -> events.Leased:
        """The event of giving it out."""
        return events.Leased(
            self.batch.lease, trainer_incarnation, self.batch.groups, self.loss_tokens, self.stale_tokens
        )


class Unscored(NamedTuple):
    """Why there is no mini-batch: groups to which the estimator gave no finite advantage."""

    group_ids: tuple[int, ...]


@dataclass(frozen=True)
class Forming:
    """A mini-batch that is being formed: everything it needs, so that `run` may take place in another thread."""

    lease: int
    trainer_incarnation: int
    version: PolicyVersion
    """The version that the mini-batch is trained on."""
    groups: list[CompleteGroup]
    history: VersionHistory
    settings: BatchSettings

    def run(self) -> Formed | Unscored:
        """Merge, score, mask and pack; reads only what is here."""
        try:
            return self.formed()
        except NotScored as error:
            group_id_G = [group.group_id for group in self.groups for _ in range(len(group.ends))]
            return Unscored(tuple(dict.fromkeys(group_id_G[g] for g in error.trajectories)))

    def formed(self) -> Formed:
        """As `run`, for a mini-batch that was scored before."""
        batch = form_mini_batch(self.lease, self.groups, self.history, self.settings)
        starts_P = np.searchsorted(batch.prompt_of_trajectory_G, np.arange(1, len(self.groups)))
        loss = tuple(tuple(loss_G.tolist()) for loss_G in np.split(batch.loss_tokens_G, starts_P))
        return Formed(batch, loss, tuple(self._stale_tokens(group.steps) for group in self.groups))

    def _stale_tokens(self, steps: Steps) -> int:
        if self.settings.max_staleness is None:
            return 0
        stale_N = self.history.staleness(steps.versions_N, self.version) > self.settings.max_staleness
        return int(np.count_nonzero(stale_N & steps.loss_mask_N & np.isfinite(steps.logprobs_N)))


class Former:
    """Makes mini-batches out of complete groups, one at a time."""

    def __init__(self, config: Config, record: Record) -> None:
        self._record = record
        self._settings = BatchSettings.of(config)
        estimator_named(self._settings.estimator)  # one that is not there ends the run now, not at the first lease
        self._last: MiniBatch | None = None

    def begin(self, group_ids: tuple[int, ...], trainer_incarnation: int) -> Forming:
        """Collect what the mini-batch of the next lease needs.

        Raises:
            ValueError: a group is not complete; it would be formed again for ever.
        """
        state = self._record.ledger.state
        for group_id in group_ids:
            if state.groups[group_id].state is not GroupState.COMPLETE:
                raise ValueError(f"group {group_id} is to be leased and is {state.groups[group_id].state}")
        return self._forming(state.next_lease, trainer_incarnation, group_ids)

    def finish(self, forming: Forming, made: Formed) -> MiniBatch | None:
        """Give the mini-batch out; None when something changed while it was being formed."""
        ledger = self._record.ledger
        groups = ledger.state.groups
        same = (forming.lease, forming.version) == (ledger.state.next_lease, ledger.history.current)
        if not same or any(
            group.group_id not in groups or groups[group.group_id].state is not GroupState.COMPLETE
            for group in forming.groups
        ):
            return None
        # Filters may have removed more while it was being formed.
        self._last = _after_filters(made.batch, forming.groups, copy(ledger.state.filtered))
        self._record.add(made.leased(forming.trainer_incarnation))
        return self._last

    def again(self, lease: int) -> MiniBatch:
        """The mini-batch of the open lease, which is formed anew after a restart."""
        if self._last is None or self._last.lease != lease:
            held = self._record.ledger.state.leases[lease]
            forming = self._forming(lease, held.trainer_incarnation, held.group_ids)
            self._last = _after_filters(forming.formed().batch, forming.groups, held.filtered)
        return self._last

    def _forming(self, lease: int, trainer_incarnation: int, group_ids: tuple[int, ...]) -> Forming:
        history = self._record.ledger.history
        groups = [self._record.complete_group(group_id) for group_id in group_ids]
        return Forming(lease, trainer_incarnation, history.current, groups, history, self._settings)


def formed(
    lease: int, groups: Sequence[CompleteGroup], history: VersionHistory, settings: BatchSettings, lost: FilteredStats
) -> MiniBatch:
    """The mini-batch of these groups, whose metrics also cover what filters removed before it."""
    return _after_filters(form_mini_batch(lease, groups, history, settings), groups, lost)


def _after_filters(batch: MiniBatch, groups: Sequence[CompleteGroup], lost: FilteredStats) -> MiniBatch:
    metrics = with_lost(batch.metrics, len(groups), sum(len(group.ends) for group in groups), lost)
    return replace(batch, metrics=metrics)


def with_lost(metrics: dict[str, float], n_groups: int, n_trajectories: int, lost: FilteredStats) -> dict[str, float]:
    """The batch's metrics, with the rewards of the groups that filters removed since the batch before.

    A batch of 1 group of 2 with mean reward 0.5, and a filtered group with rewards 1 and 1: mean (1 + 2) / 4 = 0.75.
    """
    reward = "reward/avg_raw_reward"
    mean = (metrics[reward] * n_trajectories + lost.reward_sum) / (n_trajectories + lost.trajectories)
    shares = {
        name: (share * n_groups + lost.passed) / (n_groups + lost.groups)
        for name, share in metrics.items()
        if name.startswith("reward/avg_pass_at_")
    }
    return metrics | shares | {reward: mean, "generate/filtered_groups": float(lost.groups)}
