"""Forming the open lease's mini-batch, and what becomes of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from service.config.tree import Config
from service.handoff import events
from service.handoff.batch import BatchSettings, CompleteGroup, form_mini_batch
from service.handoff.lifecycle import Lost
from service.handoff.record import Record
from service.handoff.versions import VersionHistory
from service.types import MiniBatch, Steps


class Formed(NamedTuple):
    """A mini-batch with each of its groups' tokens by what becomes of them."""

    batch: MiniBatch
    loss_tokens: tuple[tuple[int, ...], ...]
    """[P] by trajectory, tokens that carry loss."""
    stale_tokens: tuple[int, ...]
    """[P] tokens that are too old to."""

    def leased(self, trainer_epoch: int) -> events.Leased:
        """The event of giving it out."""
        return events.Leased(self.batch.lease, trainer_epoch, self.batch.groups, self.loss_tokens, self.stale_tokens)


class Former:
    """Makes mini-batches out of complete groups."""

    def __init__(self, config: Config, record: Record) -> None:
        self._record = record
        self._settings = BatchSettings.of(config)
        self._max_staleness = config.buffer.max_staleness
        self._last: MiniBatch | None = None

    def form(self, ordinals: tuple[int, ...]) -> Formed:
        """The mini-batch of the next lease."""
        state = self._record.ledger.state
        groups = [self._record.complete_group(ordinal) for ordinal in ordinals]
        self._last = self._formed(state.next_lease, groups, state.filtered)
        starts_P = np.searchsorted(self._last.prompt_of_trajectory_G, np.arange(1, len(groups)))
        loss = tuple(tuple(loss_G.tolist()) for loss_G in np.split(self._last.loss_tokens_G, starts_P))
        stale = tuple(self._stale_tokens(group.steps) for group in groups)
        return Formed(self._last, loss, stale)

    def again(self, lease: int) -> MiniBatch:
        """The mini-batch of the open lease, which is formed anew after a restart."""
        if self._last is None or self._last.lease != lease:
            held = self._record.ledger.state.leases[lease]
            groups = [self._record.complete_group(ordinal) for ordinal in held.ordinals]
            self._last = self._formed(lease, groups, held.filtered)
        return self._last

    def _formed(self, lease: int, groups: list[CompleteGroup], lost: Lost) -> MiniBatch:
        return formed(lease, groups, self._record.ledger.history, self._settings, lost)

    def _stale_tokens(self, steps: Steps) -> int:
        history = self._record.ledger.history
        stale_N = history.staleness(steps.versions_N, history.current) > self._max_staleness
        return int(np.count_nonzero(stale_N & steps.loss_mask_N & np.isfinite(steps.logprobs_N)))


def formed(
    lease: int, groups: Sequence[CompleteGroup], history: VersionHistory, settings: BatchSettings, lost: Lost
) -> MiniBatch:
    """The mini-batch of these groups, whose facts also cover what filters removed before it."""
    batch = form_mini_batch(lease, groups, history, settings)
    return replace(batch, facts=with_lost(batch.facts, len(groups), sum(len(group.ends) for group in groups), lost))


def with_lost(facts: dict[str, float], n_groups: int, n_trajectories: int, lost: Lost) -> dict[str, float]:
    """The batch's facts, with the rewards of the groups that filters removed since the batch before.

    A batch of 1 group of 2 with mean reward 0.5, and a filtered group with rewards 1 and 1: mean (1 + 2) / 4 = 0.75.
    """
    reward = "reward/avg_raw_reward"
    mean = (facts[reward] * n_trajectories + lost.reward_sum) / (n_trajectories + lost.trajectories)
    shares = {
        name: (share * n_groups + lost.passed) / (n_groups + lost.groups)
        for name, share in facts.items()
        if name.startswith("reward/avg_pass_at_")
    }
    return facts | shares | {reward: mean, "generate/filtered_groups": float(lost.groups)}
