"""How scorers' answers change a group: rewards, and the teacher's log-probabilities.

    rewards of the environment 1 0; a judge replaces them with 0.2 0.8; another scorer adds 0.1 0     ->   0.3 0.8

A scorer's reward is set on a trajectory's end record and on its last step, so that `returns: last` and `returns: sum`
give the same return. The reward counts for the role `main`: named roles keep the rewards of the environment. A
trajectory to which a scorer gave NaN is left out of its group.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from typing import NamedTuple

import msgspec
import numpy as np

from service.columns import select
from service.handoff.ledger.events import Scored
from service.handoff.steps.tables import end_of_items, said_steps
from service.handoff.steps.values import ROLES
from service.types import Ends, Float64s, Int64s, Steps

LOGPROBS = np.dtype("<f4")
"""Data type of the log-probabilities in a `Scored` event."""


class CompleteGroup(NamedTuple):
    """A group whose trajectories are all complete: the steps and end records of their final attempts, in any order."""

    group_id: int
    prompt_uid: str
    steps: Steps
    ends: Ends
    scores: tuple[Scored, ...] = ()
    """The scorers' answers, whose rewards and log-probabilities are already in `steps` and `ends`."""


def with_scores(steps: Steps, ends: Ends, scores: tuple[Scored, ...]) -> tuple[Steps, Ends, tuple[Scored, ...]]:
    """The steps, end records (sorted by sample) and scores of a group, changed by the scores; without the trajectories
    to which a scorer gave no reward (NaN)."""
    rewards = [score.rewards for score in scores if score.rewards is not None]
    if rewards:
        added_E = np.array(rewards, np.float64).sum(axis=0)
        steps, ends = _with_rewards(steps, ends, added_E, any(score.replaces for score in scores))
    for score in scores:
        if score.teacher:
            logprobs_N = np.full(len(steps.token_ids_N), np.nan, np.float32)
            logprobs_N[sampled_tokens(steps)] = np.frombuffer(score.teacher, LOGPROBS)
            steps = replace(steps, teacher_logprobs_N=logprobs_N)
    has_reward_E = ~np.isnan(ends.reward_E)
    if has_reward_E.all():
        return steps, ends, scores
    kept_K = np.flatnonzero(has_reward_E[end_of_items(steps, ends)])
    cut = tuple(
        msgspec.structs.replace(
            score,
            rewards=score.rewards and tuple(compress(score.rewards, has_reward_E)),
            info=tuple(compress(score.info, has_reward_E)),
        )
        for score in scores
    )
    return select(steps, kept_K), select(ends, np.flatnonzero(has_reward_E)), cut


def _with_rewards(steps: Steps, ends: Ends, added_E: Float64s, replaces: bool) -> tuple[Steps, Ends]:
    end_K, own_K = end_of_items(steps, ends), np.ones(len(steps), np.bool_)
    k, place_k = said_steps(steps, ends, end_K)
    own_K[k] = ends.role_S[place_k] < len(ROLES)
    last_E = np.full(len(ends), -1)
    np.maximum.at(last_E, end_K[own_K], steps.index_K[own_K])
    last = np.flatnonzero(steps.index_K == last_E[end_K])
    reward_K = np.where(own_K & replaces, 0.0, steps.reward_K)
    reward_K[last] += added_E[end_K[last]]
    later_reward_S = ends.later_reward_S.copy()
    if replaces:
        later_reward_S[place_k[own_K[k]]] = 0
    reward_E = added_E if replaces else ends.reward_E + added_E
    return replace(steps, reward_K=reward_K), replace(ends, reward_E=reward_E, later_reward_S=later_reward_S)


def sampled_tokens(steps: Steps) -> Int64s:
    """Positions of a group's sampled tokens, ordered by sample, step and position in the step, however they arrived."""
    order_K = np.lexsort((steps.index_K, steps.sample_K))
    rank_K = np.empty(len(steps), np.int64)
    rank_K[order_K] = np.arange(len(steps))
    sampled = np.flatnonzero(steps.loss_mask_N)
    item = np.searchsorted(steps.offsets_K, sampled, "right") - 1
    return sampled[np.argsort(rank_K[item], kind="stable")]
