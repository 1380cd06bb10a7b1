"""From rewards to one advantage per trajectory.

`G` runs over trajectories; a group is the trajectories of one prompt. With r a trajectory's return, m and s the mean
and the sample standard deviation of its group's returns, n the size of its group:

| estimator            | advantage                          | zero variance | group of one |
|----------------------|------------------------------------|---------------|--------------|
| `grpo`               | (r - m) / (s + 1e-6)               | 0             | r / (1 + 1e-6) |
| `grpo_no_std`        | r - m                              | 0             | r            |
| `rloo`               | (r - m) n / (n - 1)                | 0             | 0            |
| `maxrl`              | (r - m) / (m + 1e-6); 0 where that is 0 / 0 or x / 0 | 0 | r       |
| `reinforce++_baseline` | r - m, then (x - mean) / (std + 1e-8) over the mini-batch | 0 if all are | as others |
| `reinforce++`        | r; discounted and whitened per token by the learner | r | r |

MaxRL divides by the mean itself, so it is meant for rewards that are not negative: with m < 0 every sign turns over,
and with m = 0 (rewards 1 and -1) advantages are a million times the rewards, as published.

A partial group (some trajectories refused or still missing) is scored with the n that it has. Each estimator names its
source. Groups of one follow the published definitions, in which nothing is subtracted; the configuration refuses them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from service.errors import UserError
from service.handoff.ledger.events import GroupStats
from service.handoff.steps.roles import ROLES
from service.handoff.steps.tables import end_of_items, reward_of_steps, role_of_steps
from service.types import Ends, Float64s, Int64s, Steps

EPSILON = 1e-6
WHITEN_EPSILON = 1e-8

FINITE = float(np.finfo(np.float32).max)
"""Advantages are no larger, so that they stay finite in float32."""

ReturnRule = Literal["last", "sum"]
Estimator = Callable[[Float64s, Int64s], Float64s]
"""(returns_G, group_G: the group's number of each trajectory) -> advantage_G"""

ESTIMATORS: dict[str, Estimator] = {}

GROUP_ESTIMATORS = ("grpo", "grpo_no_std", "rloo", "maxrl", "reinforce++_baseline")
"""Those that compare the trajectories of a group."""


class NotScored(UserError):
    """An estimator gave some trajectories no finite advantage."""

    def __init__(self, message: str, trajectories: list[int]) -> None:
        super().__init__(message)
        self.trajectories = trajectories
        """Positions of those in `returns_G`."""


def estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Register an estimator; `algorithm.estimator: your.module:name` imports the module that does so."""

    def register(function: Estimator) -> Estimator:
        if name in ESTIMATORS:
            raise ValueError(f"there is an estimator {name!r} already")
        ESTIMATORS[name] = function
        return function

    return register


def advantages(estimator: str, returns_G: ArrayLike, prompt_uids_G: Sequence[Any] | NDArray[Any]) -> Float64s:
    """One advantage per trajectory; trajectories with the same prompt uid are a group, wherever they stand.

    Raises:
        ValueError: a return is not finite, or has no prompt uid.
        NotScored: the estimator gave something that is not finite.
        UserError: there is no such estimator, or it gave another number of advantages.

    >>> advantages("rloo", [1.0, 0.0, 0.0, 5.0, 5.0], ["a", "a", "a", "b", "b"]).tolist()
    [1.0, -0.5, -0.5, 0.0, 0.0]
    """
    if (function := ESTIMATORS.get(estimator)) is None:
        near = difflib.get_close_matches(estimator.lower(), ESTIMATORS, n=1)
        meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(ESTIMATORS)}"
        raise UserError(f"no estimator is named {estimator!r}; {meant}")
    returns = np.array(returns_G, np.float64)  # a copy, which an estimator may change
    if returns.shape != (len(prompt_uids_G),):
        raise ValueError(f"returns of shape {returns.shape} for {len(prompt_uids_G)} prompt uids")
    if not (finite_G := np.isfinite(returns)).all():
        raise ValueError(f"returns_G[{finite_G.argmin()}] is {returns[finite_G.argmin()]}, not a finite number")
    scores_G = np.asarray(function(returns, numbered(prompt_uids_G)), np.float64)
    problem = f"algorithm.estimator: {estimator!r} gave no finite number for each of {len(returns)} trajectories"
    if scores_G.shape != returns.shape:
        raise UserError(f"{problem} (shape {scores_G.shape})")
    if not (fine_G := np.abs(scores_G) <= FINITE).all():
        g = int(fine_G.argmin())
        raise NotScored(f"{problem}: number {g} has {scores_G[g]}", np.flatnonzero(~fine_G).tolist())
    return scores_G


def numbered(prompt_uids_G: Sequence[Any] | NDArray[Any]) -> Int64s:
    """The group's number of each trajectory: ("b" "a" "b") -> [0 1 0]."""
    code: dict[Any, int] = {}
    uids = prompt_uids_G.tolist() if isinstance(prompt_uids_G, np.ndarray) else prompt_uids_G
    return np.array([code.setdefault(uid, len(code)) for uid in uids], np.int64)


def returns(steps: Steps, ends: Ends, rule: ReturnRule) -> Float64s:
    """Per trajectory end its return: `last`, the end's reward, or `sum`, the rewards of its steps.

    Steps of roles that the configuration names count for those roles only.
    """
    if rule == "last" or not len(ends):
        return ends.reward_E
    own_K = np.where(role_of_steps(steps, ends) < len(ROLES), reward_of_steps(steps, ends), 0.0)
    return np.bincount(end_of_items(steps, ends), own_K, minlength=len(ends)).astype(np.float64)


def group_stats(returns_G: Float64s, group_G: NDArray[np.integer[Any]]) -> GroupStats:
    """What the metrics say about the returns of whole groups."""
    low_P = np.full(int(group_G.max(initial=-1)) + 1, np.inf)
    high_P = -low_P
    np.minimum.at(low_P, group_G, returns_G)
    np.maximum.at(high_P, group_G, returns_G)
    flat_P = low_P == high_P
    counts = (flat_P, flat_P & (low_P == 0), flat_P & (low_P == 1))
    flat, zeros, ones = (int(np.count_nonzero(of_P)) for of_P in counts)
    return GroupStats(
        len(low_P), len(returns_G), float(returns_G.sum()), int(np.count_nonzero(high_P > 0)), flat, zeros, ones
    )


@estimator("grpo")
def grpo(returns_G: Float64s, group_G: Int64s) -> Float64s:
    """Distance from the group's mean in standard deviations (arXiv 2402.03300)."""
    return np.asarray(grpo_no_std(returns_G, group_G) / (deviation(returns_G, group_G) + EPSILON))


def deviation(returns_G: Float64s, group_G: Int64s) -> Float64s:
    """Per trajectory the sample standard deviation of its group's returns; 1 for a group of one."""
    count_G, mean_G = _baseline(returns_G, group_G)
    squares_P = np.bincount(group_G, (returns_G - mean_G) ** 2)
    return np.where(count_G > 1, np.sqrt(squares_P[group_G] / np.maximum(count_G - 1, 1)), 1.0)


@estimator("grpo_no_std")
def grpo_no_std(returns_G: Float64s, group_G: Int64s) -> Float64s:
    """Distance from the group's mean (arXiv 2503.20783)."""
    return np.asarray(returns_G - _baseline(returns_G, group_G)[1])


@estimator("rloo")
def rloo(returns_G: Float64s, group_G: Int64s) -> Float64s:
    """Distance from the mean of the group's other trajectories (arXiv 2402.14740)."""
    count_G, mean_G = _baseline(returns_G, group_G)
    scaled_G = (returns_G - mean_G) * count_G / np.maximum(count_G - 1, 1)
    return np.where(count_G > 1, scaled_G, 0.0)


@estimator("maxrl")
def maxrl(returns_G: Float64s, group_G: Int64s) -> Float64s:
    """Distance from the group's mean in units of that mean (arXiv 2602.02710)."""
    count_G, mean_G = _baseline(returns_G, group_G)
    below_G = mean_G + EPSILON
    scaled_G = np.divide(returns_G - mean_G, below_G, out=np.zeros_like(returns_G), where=below_G != 0)
    return np.where(count_G > 1, scaled_G, returns_G)


@estimator("reinforce++_baseline")
def reinforce_plus_plus_baseline(returns_G: Float64s, group_G: Int64s) -> Float64s:
    """Distance from the group's mean, whitened over the mini-batch (arXiv 2501.03262)."""
    distance_G = returns_G - _baseline(returns_G, group_G)[1]
    if len(distance_G) < 2:
        return distance_G
    return np.asarray((distance_G - distance_G.mean()) / (distance_G.std(ddof=1) + WHITEN_EPSILON))


@estimator("reinforce++")
def reinforce_plus_plus(returns_G: Float64s, group_G: Int64s) -> Float64s:
    """The return as it is: the learner discounts it along the tokens and whitens it (`learn.losses.advantage`;
    arXiv 2501.03262)."""
    return returns_G


def _baseline(returns_G: Float64s, group_G: Int64s) -> tuple[Int64s, Float64s]:
    """Per trajectory the size of its group and the group's mean return; 0 for a group of one.

    The mean of equal returns is that return exactly, so that a group without variance has advantages of exactly 0.
    """
    count_P = np.bincount(group_G)
    first_P = np.zeros(len(count_P))
    first_P[group_G[::-1]] = returns_G[::-1]
    above_P = np.bincount(group_G, returns_G - first_P[group_G]) / np.maximum(count_P, 1)
    mean_P = np.where(count_P > 1, first_P + above_P, 0.0)
    return count_P[group_G], mean_P[group_G]
