"""Filters: remove complete groups before training, and count them by reason; a removed group frees its slot.

| reason          | setting                | the group                                                             |
|-----------------|------------------------|-----------------------------------------------------------------------|
| `zero_variance` | `filter_zero_variance` | the returns are equal but for rounding; by turn, all advantages are 0 |
| `over_long`     | `filter_over_long`     | more than this fraction of its trajectories is over-long              |

A trajectory is over-long if its next prompt exceeded a length limit, or its last response was cut (`OVER_LONG`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.handoff.batches.batch_metrics import group_stats
from service.handoff.batches.credit import Rule, returns, teaches
from service.handoff.ledger.events import Ended, GroupState, Tried
from service.handoff.ledger.record import Record
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.steps.tables import Episodes
from service.handoff.steps.values import OVER_LONG, TRAINED


@dataclass(frozen=True, slots=True)
class FilterSettings:
    """Settings of the filters that are applied to a complete group."""

    rule: Rule
    train: tuple[str, ...] = TRAINED
    """Roles whose steps carry loss."""
    zero_variance: bool = False
    over_long: float | None = None
    """Fraction of over-long trajectories above which a group is removed; None: groups are not removed for length."""
    success_above: float | None = None
    """Return above which a trajectory counts as a success for the curriculum; None without a curriculum."""

    @property
    def any(self) -> bool:
        """Whether complete groups have to be examined, because a filter or a curriculum is configured."""
        return self.zero_variance or self.over_long is not None or self.success_above is not None


def filtered(group: CompleteGroup, settings: FilterSettings) -> Ended | None:
    """The event that ends a complete group untrained; None if no filter removes the group."""
    played = Episodes.of(group.steps, group.ends)
    over_long = [group.ends.stop_reasons[code] in OVER_LONG for code in group.ends.stop_reason_E.tolist()]
    if settings.zero_variance and not teaches(played, settings.rule, settings.train):
        reason = "zero_variance"
    elif settings.over_long is not None and sum(over_long) / max(len(over_long), 1) > settings.over_long:
        reason = "over_long"
    else:
        return None
    return_G = returns(played, settings.rule.returns)
    stats = group_stats(return_G, np.zeros(len(return_G), np.int64))
    stats.tokens = int(np.count_nonzero(group.steps.loss_mask_N))
    return Ended(group.group_id, GroupState.FILTERED, reason, stats)


def examine(record: Record, settings: FilterSettings) -> None:
    """Record the success of newly complete groups for a curriculum, and end groups that a filter removes."""
    unexamined, groups = record.ledger.unexamined, record.ledger.state.groups
    while unexamined:
        group = groups.get(group_id := unexamined.pop(0))
        is_new = group is not None and group.state is GroupState.COMPLETE and not group.lease_count
        if group is None or not is_new or group.rolled_back or not settings.any:
            continue
        complete = record.complete_group(group_id)
        if settings.success_above is not None and not group.tried:
            return_G = returns(Episodes.of(complete.steps, complete.ends), settings.rule.returns)
            record.add(Tried(group_id, int(np.count_nonzero(return_G > settings.success_above)), len(return_G)))
        if (ended := filtered(complete, settings)) is not None:
            record.add(ended)
