"""Filters: complete groups that end untrained, each with a counted reason, and vacate their slot.

| reason          | setting                | the group                                                     |
|-----------------|------------------------|---------------------------------------------------------------|
| `zero_variance` | `filter_zero_variance` | every advantage would be 0, as where all returns are equal    |
| `over_long`     | `filter_over_long`     | more than that fraction of its trajectories are over-long     |

A trajectory is over-long where its next prompt had no room, or its last response was cut (`OVER_LONG`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from service.config.learn import AlgorithmConfig
from service.config.tree import Config
from service.handoff.batches.advantages import Rule, teaches
from service.handoff.batches.batch import CompleteGroup
from service.handoff.batches.score import group_stats, returns
from service.handoff.ledger.events import Ended, Tried
from service.handoff.ledger.lifecycle import GroupState
from service.handoff.ledger.record import Record
from service.handoff.ledger.replaying import complete_group
from service.handoff.steps.roles import TRAINED
from service.handoff.steps.stop_reason import OVER_LONG


def filtered(
    group: CompleteGroup, settings: AlgorithmConfig, named: tuple[str, ...] = (), train: Sequence[str] = TRAINED
) -> Ended | None:
    """The event that ends a complete group untrained; None if no filter removes it.

    `named`: the roles that the configuration names; `train`: those that are trained.
    """
    return_G = returns(group.steps, group.ends, settings.returns)
    rule = Rule(settings.estimator, settings.returns, settings.credit, settings.gamma, named)
    reason = None
    if settings.filter_zero_variance and not teaches(group.steps, group.ends, rule, train):
        reason = "zero_variance"
    elif settings.filter_over_long is not None and over_long_fraction(group) > settings.filter_over_long:
        reason = "over_long"
    if reason is None:
        return None
    stats = group_stats(return_G, np.zeros(len(return_G), np.int64))
    stats.tokens = int(np.count_nonzero(group.steps.loss_mask_N))
    return Ended(group.group_id, GroupState.FILTERED, reason, stats)


def over_long_fraction(group: CompleteGroup) -> float:
    """Fraction of the group's trajectories that ended at a length limit."""
    long = [reason in OVER_LONG for reason in group.ends.stop_reasons]
    return float(np.mean([long[code] for code in group.ends.stop_reason_E.tolist()] or [False]))


def examines(config: Config) -> bool:
    """Whether anything follows from a group's completion: there is a filter, or a curriculum."""
    algorithm = config.algorithm
    return (
        algorithm.filter_zero_variance or algorithm.filter_over_long is not None or config.data.curriculum is not None
    )


def examine(record: Record, config: Config, group_ids: Iterable[int]) -> None:
    """Note how those of the groups that are complete went, where there is a curriculum, and end those that a filter
    removes."""
    groups, algorithm, curriculum = record.ledger.state.groups, config.algorithm, config.data.curriculum
    if not examines(config):
        return
    for group_id in [o for o in group_ids if groups[o].state is GroupState.COMPLETE]:
        group = complete_group(record, group_id)
        if curriculum is not None and not groups[group_id].tried:
            return_G = returns(group.steps, group.ends, algorithm.returns)
            successes = int(np.count_nonzero(return_G > curriculum.success_above))
            record.add(Tried(group_id, successes, len(return_G)))
        if (ended := filtered(group, algorithm, tuple(config.roles), config.trained_roles)) is not None:
            record.add(ended)
