"""Credit: turns rewards into one advantage per trajectory, or one per turn, by the estimators of `estimators`.

**By turn** (`credit`; `T` turns, `K` the turns of all trajectories, one trajectory after the other): the value of turn
t is the whole return, or with `return_to_go` r_t + gamma r_(t+1) + gamma^2 r_(t+2) + ... The baseline of turn t is the
mean value of turn t in the group's other trajectories; one that ended before counts as 0 (docs/credit.md).

    rewards   a: 0 1    b: 1    gamma 1      values  a: 1 1    b: 1 (0)      rloo  a: 0 1    b: 0

**By role**: the turns of one role in one trajectory, in order, are treated like a trajectory of their own, with a
return of their own. Roles that the configuration names have rewards, groups and baselines of their own; all other turns
belong to `main`:

    rewards of a trajectory's turns    main 0   verifier 1   main 0.5
    its returns with `returns: sum`    main 0.5   verifier 1

With `returns: last` the return of a named role is the reward of the role's last turn, and the return of `main` is the
reward of the end record. A trajectory without turns of a role has no return of that role; where only one trajectory of
a group has a role, the estimators that compare trajectories (`GROUP_ESTIMATORS`) give it the advantage 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from service.columns import check_choice, codes_of, lengths_of, offsets_of
from service.errors import UserError
from service.handoff.batches.batch_metrics import group_stats, reward_metrics
from service.handoff.batches.estimators import (
    EPSILON,
    FINITE,
    GROUP_ESTIMATORS,
    NOT_BY_TURN,
    TURN_ESTIMATORS,
    NoAdvantage,
    advantages,
    deviation,
    grpo_no_std,
    levelled,
    ranges,
    rloo,
)
from service.handoff.steps.tables import Episodes
from service.handoff.steps.values import ROLES, Role
from service.types import Float32s, Float64s, Int32s, Int64s

ReturnRule = Literal["last", "sum"]
Credit = Literal["trajectory", "return_to_go"]


class Rule(NamedTuple):
    """Settings that determine how rewards become advantages."""

    estimator: str = "grpo"
    returns: ReturnRule = "last"
    credit: Credit = "trajectory"
    gamma: float = 1.0
    """Discount factor per turn; used only if credit is given by turn."""
    named: tuple[str, ...] = ()
    """Roles that have rewards and baselines of their own, in the order of their numbers (`steps.values`)."""

    @property
    def by_turn(self) -> bool:
        """Whether the turns of one trajectory may have different advantages."""
        return self.credit != "trajectory" or bool(self.named)


class Advantages(NamedTuple):
    """The advantages of a mini-batch."""

    return_G: Float64s
    advantage_G: Float64s
    """The advantage of each trajectory; if its turns may have different advantages, the mean over its turns."""
    turn_advantage_K: Float32s | None
    """The advantage of each turn; None if all turns of a trajectory have one advantage (not `Rule.by_turn`)."""
    metrics: dict[str, float]


def advantages_of(played: Episodes, prompt_G: Int32s, rule: Rule) -> Advantages:
    """The advantages of complete trajectories in the groups `prompt_G`; raises a NoAdvantage if one is not finite."""
    return_G = returns(played, rule.returns)
    metrics = reward_metrics(group_stats(return_G, prompt_G))
    metrics["reward/mean_positive_reward"] = float(np.maximum(return_G, 0).sum() / max(len(return_G), 1))
    if not rule.by_turn:
        return Advantages(return_G, advantages(rule.estimator, return_G, prompt_G), None, metrics)
    advantage_K, prompt_K = np.zeros(len(played.steps)), prompt_G[played.end_K]
    for part in parts(played, rule):
        advantage_K[part.place_X] = part.advantages(prompt_G, rule)
        if rule.named:
            metrics |= _role_metrics(part, advantage_K, prompt_K)
    if rule.credit != "trajectory":
        moved_P = np.bincount(prompt_K, advantage_K != 0, minlength=int(prompt_G.max()) + 1)
        metrics["reward/groups_without_credit"] = float((moved_P == 0).mean())
    sum_G = np.bincount(played.end_K, advantage_K, minlength=len(played.ends))
    mean_G = sum_G / np.maximum(lengths_of(played.first_G), 1)
    return Advantages(return_G, mean_G, advantage_K.astype(np.float32), metrics)


def teaches(played: Episodes, rule: Rule, train: Sequence[str]) -> bool:
    """Whether a group has a turn of a trained role with a nonzero advantage; False if all returns are equal but for
    rounding."""
    trained = (part for part in parts(played, rule) if part.role in train)
    if rule.credit == "trajectory":
        return any(not ranges(part.return_V, np.zeros(len(part.return_V), np.int64))[2].all() for part in trained)
    return any(part.advantages(np.zeros(len(played.ends), np.int32), rule).any() for part in trained)


def returns(played: Episodes, rule: ReturnRule) -> Float64s:
    """[G] the reward of each trajectory's end record, or the sum of its steps' rewards without those of named roles."""
    if rule == "last":
        return played.ends.reward_E
    own_K = np.where(played.role_K < len(ROLES), played.reward_K, 0.0)
    return np.bincount(played.end_K, own_K, minlength=len(played.ends)).astype(np.float64)


# -- by role ----------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """The turns of one role in the trajectories of a mini-batch."""

    role: str
    number_V: Int64s
    """The trajectories that have the role, as the positions of their end records."""
    return_V: Float64s
    first_V: Int64s
    """[V + 1] where each trajectory's turns begin on the axis X."""
    reward_X: Float64s
    place_X: Int64s
    """The position of each turn on the axis `K`, which has the turns of all roles."""

    def advantages(self, prompt_G: Int32s, rule: Rule) -> Float64s:
        """[X] the advantage of each turn; raises a NoAdvantage, with the positions of end records, if it is not finite.
        Where only one trajectory of a group has the role, the estimators in `GROUP_ESTIMATORS` give 0."""
        group_V, n_turns_V = prompt_G[self.number_V].astype(np.int64), lengths_of(self.first_V)
        try:
            if rule.credit == "trajectory":
                advantage_X = np.repeat(advantages(rule.estimator, self.return_V, group_V), n_turns_V)
            else:
                advantage_X = credited(self.first_V, self.reward_X, group_V, rule.credit, rule.gamma, rule.estimator)
        except NoAdvantage as error:
            raise NoAdvantage(str(error), self.number_V[error.trajectories].tolist()) from error
        if rule.estimator not in GROUP_ESTIMATORS:
            return advantage_X
        alone_V = np.bincount(group_V)[group_V] == 1  # no other trajectory of the group has the role
        return np.where(np.repeat(alone_V, n_turns_V), 0.0, advantage_X)


def parts(played: Episodes, rule: Rule) -> Iterator[Part]:
    """Yield the turns of the role `main`, then the turns of each named role that has any, in configured order."""
    for code, role in ((0, str(Role.MAIN)), *enumerate(rule.named, len(ROLES))):
        place_X = np.flatnonzero(played.role_K < len(ROLES) if code == 0 else played.role_K == code)
        n_turns_G = np.bincount(played.end_K[place_X], minlength=len(played.ends))
        number_V = np.arange(len(played.ends)) if code == 0 else np.flatnonzero(n_turns_G)
        if not len(number_V):
            continue
        first_V, reward_X = offsets_of(n_turns_G[number_V]), played.reward_K[place_X]
        if code == 0:
            return_V = returns(played, rule.returns)
        elif rule.returns == "last":
            return_V = reward_X[first_V[1:] - 1]
        else:
            return_V = np.add.reduceat(reward_X, first_V[:-1])
        yield Part(role, number_V, return_V, first_V, reward_X, place_X)


def _role_metrics(part: Part, advantage_X: Float64s, prompt_X: Int32s) -> dict[str, float]:
    """Metrics over the groups with turns of a role."""
    moved_P = np.bincount(prompt_X[part.place_X], advantage_X[part.place_X] != 0)
    spoke_P = np.bincount(prompt_X[part.place_X])
    return {
        f"role/{part.role}/reward": float(part.return_V.mean()),
        f"role/{part.role}/turns": len(part.place_X) / len(part.number_V),
        f"role/{part.role}/groups_without_credit": float((moved_P[spoke_P > 0] == 0).mean()) if len(spoke_P) else 0.0,
    }


# -- by turn ----------------------------------------------------------------------------------------------------------


def turn_advantages(
    rewards: Sequence[ArrayLike],
    prompt_uids: Sequence[Any] | NDArray[Any],
    credit: Credit = "return_to_go",
    gamma: float = 1.0,
    estimator: str = "rloo",
) -> list[Float64s]:
    """The advantage of every turn: one array per trajectory. `rewards` has one sequence of turn rewards per trajectory.

    Raises:
        ValueError: a reward is not finite, `gamma` or `credit` is invalid, or rewards and uids differ in number.
        NoAdvantage: an advantage is not finite.
        UserError: the estimator cannot be used per turn, or is unknown.

    >>> [advantage_T.tolist() for advantage_T in turn_advantages([[0.0, 1.0], [1.0]], ["a", "a"])]
    [[0.0, 1.0], [0.0]]
    """
    check_choice("credit", credit, Credit)
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma}: a discount is between 0 and 1")
    reward_G = [np.asarray(turns, np.float64) for turns in rewards]
    if len(prompt_uids) != len(reward_G):
        raise ValueError(f"rewards of {len(reward_G)} trajectories for {len(prompt_uids)} prompt uids")
    first_G = offsets_of(np.array([len(turns) for turns in reward_G], np.int64))
    reward_X = np.concatenate([np.zeros(0), *reward_G])
    if not np.isfinite(reward_X).all():
        raise ValueError("a reward is no finite number")
    advantage_X = credited(first_G, reward_X, codes_of(prompt_uids)[1].astype(np.int64), credit, gamma, estimator)
    return np.split(advantage_X, first_G[1:-1]) if reward_G else []


def credited(
    first_G: Int64s, reward_X: Float64s, group_G: Int64s, credit: Credit, gamma: float, estimator: str
) -> Float64s:
    """[X] the advantage of each turn from its reward; `first_G`: where the turns of each trajectory begin, `group_G`:
    each trajectory's group; other arguments as in `turn_advantages`."""
    n_turns_G = lengths_of(first_G)
    alive_GT = np.arange(int(n_turns_G.max(initial=0))) < n_turns_G[:, None]  # whether trajectory g has a turn t
    reward_GT: Float64s = np.zeros(alive_GT.shape)
    reward_GT[alive_GT] = reward_X
    return_G = levelled(reward_GT.sum(axis=1), group_G)
    if credit == "trajectory":
        return np.repeat(advantages(estimator, return_G, group_G), n_turns_G)
    if estimator not in TURN_ESTIMATORS:
        raise UserError(f"algorithm.credit: {estimator!r} {NOT_BY_TURN}")
    value_GT = reward_GT  # summed from the last turn to the first
    for t in range(value_GT.shape[1] - 2, -1, -1):
        value_GT[:, t] += gamma * value_GT[:, t + 1]
    column_X = (group_G[:, None] * alive_GT.shape[1] + np.arange(alive_GT.shape[1])).reshape(-1)
    distance = rloo if estimator == "rloo" else grpo_no_std
    advantage_GT = distance(levelled(value_GT.reshape(-1), column_X), column_X).reshape(alive_GT.shape)
    if estimator == "grpo":
        std_G = deviation(return_G, group_G)
        advantage_GT = np.where(std_G[:, None] == 0, 0.0, advantage_GT / (std_G[:, None] + EPSILON))
    if not (fine_G := (np.abs(advantage_GT) <= FINITE).all(axis=1)).all():
        raise NoAdvantage("a turn has no finite advantage", np.flatnonzero(~fine_G).tolist())
    return np.asarray(advantage_GT[alive_GT])
