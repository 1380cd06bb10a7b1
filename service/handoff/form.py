"""Forming the open lease's mini-batch, and what becomes of its tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from service.config.tree import Config
from service.handoff import events
from service.handoff.batch import BatchSettings, CompleteGroup, form_mini_batch
from service.handoff.lifecycle import Lost
from service.handoff.record import Record
from service.types import MiniBatch, Steps


class Formed(NamedTuple):
    """A mini-batch with each of its groups' tokens by what becomes of them."""

    batch: MiniBatch
    loss_tokens: tuple[int, ...]
    """[P] tokens that carry loss."""
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
        self._n_samples = config.algorithm.n_samples_per_prompt
        self._max_staleness = config.buffer.max_staleness
        self._last: MiniBatch | None = None

    def form(self, ordinals: tuple[int, ...]) -> Formed:
        """The mini-batch of the next lease."""
        state = self._record.ledger.state
        groups = [self._record.complete_group(ordinal) for ordinal in ordinals]
        self._last = self._formed(state.next_lease, groups, state.filtered)
        loss_P = np.bincount(self._last.prompt_of_trajectory_G, self._last.loss_tokens_G, minlength=len(groups))
        stale = tuple(self._stale_tokens(group.steps) for group in groups)
        return Formed(self._last, tuple(int(loss) for loss in loss_P), stale)

    def again(self, lease: int) -> MiniBatch:
        """The mini-batch of the open lease, which is formed anew after a restart."""
        if self._last is None or self._last.lease != lease:
            held = self._record.ledger.state.leases[lease]
            groups = [self._record.complete_group(ordinal) for ordinal in held.ordinals]
            self._last = self._formed(lease, groups, held.filtered)
        return self._last

    def _formed(self, lease: int, groups: list[CompleteGroup], lost: Lost) -> MiniBatch:
        batch = form_mini_batch(lease, groups, self._record.ledger.history, self._settings)
        return replace(batch, facts=with_lost(batch.facts, len(groups), self._n_samples, lost))

    def _stale_tokens(self, steps: Steps) -> int:
        history = self._record.ledger.history
        stale_N = history.staleness(steps.versions_N, history.current) > self._max_staleness
        return int(np.count_nonzero(stale_N & steps.loss_mask_N & np.isfinite(steps.logprobs_N)))


def with_lost(facts: dict[str, float], n_groups: int, n_samples: int, lost: Lost) -> dict[str, float]:
    """The batch's facts, with the rewards of the groups that filters removed since the batch before.

    A batch of 1 group of 2 with mean reward 0.5, and a filtered group with rewards 1 and 1: mean (1 + 2) / 4 = 0.75.
    """
    n_trajectories = n_groups * n_samples
    reward, passed = "reward/avg_raw_reward", f"reward/avg_pass_at_{n_samples}"
    mean = (facts[reward] * n_trajectories + lost.reward_sum) / (n_trajectories + lost.trajectories)
    share = (facts[passed] * n_groups + lost.passed) / (n_groups + lost.groups)
    return facts | {reward: mean, passed: share, "generate/filtered_groups": float(lost.groups)}
