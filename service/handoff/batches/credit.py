"""From rewards of turns to one advantage per turn, without bias.

`G` runs over trajectories, `T` over turns, `X` over the turns of all trajectories, one trajectory after the other.
With r the reward of a turn and phi the score of the state in which a turn begins:

| credit         | value of turn t                                                   | terms of a baseline          |
|----------------|-------------------------------------------------------------------|------------------------------|
| `trajectory`   | the whole return, the same for every turn                         | returns of the group         |
| `return_to_go` | G_t = r_t + gamma r_(t+1) + gamma^2 r_(t+2) + ...                 | the group's values at turn t |
| `potential`    | as above, of the rewards r_t + gamma phi_(t+1) - phi_t            | the group's values at turn t |

**The baseline of turn t** is the mean over the other trajectories of the group; one that has ended before turn t counts
with 0. It depends on nothing that this trajectory did, so it adds no bias, also where the policy decides when to stop.
The mean over the trajectories that are still alive does: whoever goes on is compared with fewer and other trajectories.

    rewards   a: 0 1    b: 1    gamma 1      values  a: 1 1    b: 1 (0)      rloo  a: 0 1    b: 0

The shaped rewards of `potential` add up to G_t - phi_t, because the score after the last turn counts as 0, however the
trajectory ended; so shaping does not move the optimum (Ng, Harada and Russell 1999). A state without a score has that
of the last state before it that has one, 0 at the start: the difference counts at the next score.

Estimators keep their meaning: `rloo` is the distance from that baseline (arXiv 2402.14740); `grpo_no_std` has the
trajectory itself in the mean, which only scales by (n - 1) / n (arXiv 2503.20783); `grpo` divides that by the group's
standard deviation of whole returns (arXiv 2402.03300), and is 0 where these do not vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from service.columns import lengths_of, offsets_of
from service.errors import UserError
from service.handoff.batches.score import EPSILON, FINITE, NotScored, advantages, deviation, grpo_no_std, numbered, rloo
from service.handoff.prefixes.merge import check_choice
from service.handoff.prefixes.step_equality import in_order
from service.handoff.steps.tables import end_of_items, reward_of_steps
from service.types import Bools, Ends, Float64s, Int32s, Int64s, Steps

Credit = Literal["trajectory", "return_to_go", "potential"]

TURN_ESTIMATORS = ("grpo", "grpo_no_std", "rloo")


class TurnRewards(NamedTuple):
    """What every turn of some trajectories got."""

    first_G: Int64s
    """[G + 1] where each trajectory's turns begin on the axis X."""
    reward_X: Float64s
    score_X: Float64s
    """The score of the state after the turn; NaN where there is none."""

    @property
    def alive_GT(self) -> Bools:
        """Whether a trajectory has a turn t."""
        turns_G = lengths_of(self.first_G)
        return np.asarray(np.less.outer(np.arange(int(turns_G.max(initial=0))), turns_G).T)


def turn_advantages(
    rewards: Sequence[ArrayLike],
    prompt_uids: Sequence[Any] | NDArray[Any],
    credit: Credit = "return_to_go",
    gamma: float = 1.0,
    estimator: str = "rloo",
    scores: Sequence[ArrayLike] | None = None,
) -> list[Float64s]:
    """One advantage per turn, an array per trajectory, of one sequence of turn rewards per trajectory.

    `scores`: likewise the scores of the states after the turns, for `potential`; NaN where there is none.

    Raises:
        ValueError: a reward is not finite, a score is infinite, a trajectory has no prompt uid or other turns, there is
            no such credit, or `gamma` is not in [0, 1].
        NotScored: an advantage is not finite.
        UserError: the estimator has no meaning by turn, or there is none of that name.

    >>> [advantage_T.tolist() for advantage_T in turn_advantages([[0.0, 1.0], [1.0]], ["a", "a"])]
    [[0.0, 1.0], [0.0]]
    """
    check_choice("credit", credit, Credit)
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma}: a discount is between 0 and 1")
    reward_G = [np.asarray(turns, np.float64) for turns in rewards]
    score_G = [np.full(len(r), np.nan) for r in reward_G] if scores is None else [np.asarray(s) for s in scores]
    if [len(s) for s in score_G] != [len(r) for r in reward_G] or len(prompt_uids) != len(reward_G):
        raise ValueError("rewards, scores and prompt uids are not of the same trajectories and turns")
    first_G = offsets_of(np.array([len(turns) for turns in reward_G], np.int64))
    turns = TurnRewards(first_G, _joined(reward_G), _joined(score_G))
    if not np.isfinite(turns.reward_X).all() or np.isinf(turns.score_X).any():
        raise ValueError("a reward or a score is no finite number")
    advantage_X = credited(turns, numbered(prompt_uids), credit, gamma, estimator)
    return np.split(advantage_X, first_G[1:-1]) if reward_G else []


def turn_rewards(steps: Steps, ends: Ends) -> TurnRewards:
    """The rewards and scores of trajectories in the order of their ends; a turn's number is its step's index."""
    steps, number_K, order = in_order_of_ends(steps, ends)
    score_K = np.full(len(steps), np.nan) if steps.score_K is None else steps.score_K
    first_G = offsets_of(np.bincount(number_K, minlength=len(ends)))
    return TurnRewards(first_G, reward_of_steps(steps, ends)[order], score_K[order])


def in_order_of_ends(steps: Steps, ends: Ends) -> tuple[Steps, Int32s, Int64s]:
    """The steps in order, the end of each one's trajectory, and the order of the axis X."""
    steps, _ = in_order(steps)
    number_K = end_of_items(steps, ends)
    return steps, number_K, np.argsort(number_K, kind="stable")


def credited(turns: TurnRewards, group_G: Int64s, credit: Credit, gamma: float, estimator: str) -> Float64s:
    """[X] the advantages of turns of trajectories of these groups; see `turn_advantages`."""
    alive_GT = turns.alive_GT
    reward_GT: Float64s = np.zeros(alive_GT.shape)
    reward_GT[alive_GT] = turns.reward_X
    return_G = reward_GT.sum(axis=1)
    if credit == "trajectory":
        return np.repeat(advantages(estimator, return_G, group_G), lengths_of(turns.first_G))
    if estimator not in TURN_ESTIMATORS:
        raise UserError(f"algorithm.credit: {estimator!r} {not_by_turn(estimator)}")
    value_GT = reward_GT  # from the last turn to the first
    for t in range(value_GT.shape[1] - 2, -1, -1):
        value_GT[:, t] += gamma * value_GT[:, t + 1]
    if credit == "potential":
        value_GT -= _scores_before(turns, alive_GT)
    column_GT = group_G[:, None] * alive_GT.shape[1] + np.arange(alive_GT.shape[1])
    distance = rloo if estimator == "rloo" else grpo_no_std
    advantage_GT = distance(value_GT.reshape(-1), column_GT.reshape(-1)).reshape(alive_GT.shape)
    if estimator == "grpo":
        std_G = deviation(return_G, group_G)
        advantage_GT = np.where(std_G[:, None] < EPSILON, 0.0, advantage_GT / (std_G[:, None] + EPSILON))
    if not (fine_G := (np.abs(advantage_GT) <= FINITE).all(axis=1)).all():
        raise NotScored("a turn has no finite advantage", np.flatnonzero(~fine_G).tolist())
    return np.asarray(advantage_GT[alive_GT])


def not_by_turn(estimator: str) -> str:
    """Why an estimator has no meaning turn by turn."""
    return {
        "maxrl": "divides by the mean return, which at later turns may be 0 or belong to few trajectories",
        "reinforce++_baseline": "whitens over the mini-batch, so that an advantage depends on how many turns all other "
        "trajectories have",
        "reinforce++": "discounts along the tokens already",
    }.get(estimator, "is defined on whole returns only") + f"; use {', '.join(TURN_ESTIMATORS)}"


def _scores_before(turns: TurnRewards, alive_GT: Bools) -> Float64s:
    """[G, T] the score of the state in which each turn begins: the last score before it, else 0; 0 after the end."""
    score_GT = np.full((alive_GT.shape[0], alive_GT.shape[1] + 1), np.nan)
    score_GT[:, 1:][alive_GT] = turns.score_X
    score_GT[:, 0] = 0.0
    known_GT = np.where(np.isnan(score_GT), 0, np.arange(score_GT.shape[1]))
    np.maximum.accumulate(known_GT, axis=1, out=known_GT)
    return np.where(alive_GT, np.take_along_axis(score_GT, known_GT, axis=1)[:, :-1], 0.0)


def _joined(parts: Sequence[NDArray[Any]]) -> Float64s:
    return np.concatenate([np.zeros(0), *parts])
