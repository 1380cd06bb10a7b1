"""Which sampled tokens carry loss: not those of untrained roles, without a finite log-probability, or too stale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from service.columns import lengths_of
from service.handoff.ledger.lifecycle import Fate
from service.handoff.ledger.versions import VersionHistory
from service.handoff.steps.roles import ROLES
from service.handoff.steps.tables import Played
from service.types import Int32s, Int64s, Rows, Steps


def without_untrained(
    played: Played, prompt_G: Int32s, train: Sequence[str], named_roles: Sequence[str]
) -> tuple[Steps, tuple[dict[Fate, int], ...]]:
    """The steps, without loss where their roles are not in `train`; and the tokens of each group that lost it, by fate.

    The tokens stay, because later steps may continue them:

        trajectory   step 0 aux [7 8]   step 1 main [1 2 3]   step 2 main, after it [4]
        loss                 0 0                1 1 1                               1      2 tokens of the fate aux
    """
    steps, names = played.steps, (*ROLES, *named_roles)
    untrained_K = ~np.isin(played.role_K, [code for code, role in enumerate(names) if role in train])
    counts = [Counter[Fate]() for _ in range(int(prompt_G.max(initial=-1)) + 1)]
    if not untrained_K.any():
        return steps, tuple(map(dict, counts))
    for k in np.flatnonzero(untrained_K).tolist():
        # Of the named roles only a judge has tokens that the policy sampled and is not trained on.
        fate = Fate(ROLES[played.role_K[k]]) if played.role_K[k] < len(ROLES) else Fate.JUDGE
        sampled = np.count_nonzero(steps.loss_mask_N[steps.offsets_K[k] : steps.offsets_K[k + 1]])
        counts[prompt_G[played.end_K[k]]][fate] += int(sampled)
    mask_N = steps.loss_mask_N & ~np.repeat(untrained_K, lengths_of(steps.offsets_K))
    return replace(steps, loss_mask_N=mask_N), tuple(map(dict, counts))


class Masked(NamedTuple):
    """What is left of the loss, and why."""

    staleness_N: Int32s
    """Versions between sampling and training; -1 where no policy sampled the token."""
    sampled_G: Int64s
    """Tokens of each trajectory that carried loss before; then those that are too stale, and those that carry it."""
    stale_G: Int64s
    loss_G: Int64s


def mask(rows: Rows, trajectory_R: Int32s, count: int, history: VersionHistory, max_staleness: int | None) -> Masked:
    """Take the loss, in place, from tokens without a finite log-probability and from stale tokens.

    staleness     -1 0 3 3       max_staleness 2
    log-probab.    0 . . nan
    loss before    0 1 1 1   ->  0 1 0 0       1 stale token
    """
    staleness_N, mask_N = history.staleness(rows.versions_N, history.current), rows.loss_mask_N
    sampled_G = _per_trajectory(rows, trajectory_R, count)
    finite_N = np.isfinite(rows.logprobs_N)
    if not finite_N.all():
        np.logical_and(mask_N, finite_N, out=mask_N)
    loss_G = _per_trajectory(rows, trajectory_R, count)
    stale_G = np.zeros(count, np.int64)
    if max_staleness is not None and staleness_N.max(initial=0) > max_staleness:
        np.logical_and(mask_N, staleness_N <= max_staleness, out=mask_N)
        stale_G = loss_G - _per_trajectory(rows, trajectory_R, count)
    np.copyto(rows.logprobs_N, 0, where=~mask_N)
    return Masked(staleness_N, sampled_G, stale_G, loss_G - stale_G)


def _per_trajectory(rows: Rows, trajectory_R: Int32s, count: int) -> Int64s:
    """Tokens that carry loss, by trajectory."""
    bounds = rows.offsets_R.tolist()
    tokens_R = [np.count_nonzero(rows.loss_mask_N[start:stop]) for start, stop in pairwise(bounds)]
    return np.bincount(trajectory_R, tokens_R, minlength=count).astype(np.int64)
