"""From rewards to one advantage per trajectory.

`G` runs over trajectories; a group is the trajectories of one prompt. With r a trajectory's return, m and s the mean
and the sample standard deviation of its group's returns, n the size of its group:

| estimator            | advantage                          | zero variance | group of one |
|----------------------|------------------------------------|---------------|--------------|
| `grpo`               | (r - m) / (s + 1e-6)               | 0             | r / (1 + 1e-6) |
| `grpo_no_std`        | r - m                              | 0             | r            |
| `rloo`               | (r - m) n / (n - 1)                | 0             | 0            |
| `maxrl`              | (r - m) / (m + 1e-6)               | 0             | r            |
| `reinforce++_baseline` | r - m, then (x - mean) / (std + 1e-8) over the mini-batch | 0 if all are | as others |
| `reinforce++`        | r; discounted and whitened per token by the learner | r | r |

A partial group (some trajectories refused or still missing) is scored with the n that it has. Groups of one follow
the published definitions above, in which nothing is subtracted; the configuration refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from service.errors import UserError
from service.handoff.columns import trajectories
from service.types import Ends, Float64s, Int64s, Steps

EPSILON = 1e-6
WHITEN_EPSILON = 1e-8

ReturnRule = Literal["last", "sum"]
Estimator = Callable[[Float64s, Int64s], Float64s]
"""(returns_G, group_G: the group's number of each trajectory) -> advantage_G"""

ESTIMATORS: dict[str, Estimator] = {}


def estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Register an estimator under a name that the configuration may use."""

    def register(function: Estimator) -> Estimator:
        if name in ESTIMATORS:
            raise ValueError(f"there is an estimator {name!r} already")
        ESTIMATORS[name] = function
        return function

    return register


def advantages(estimator: str, returns_G: ArrayLike, prompt_uids_G: Sequence[Any] | NDArray[Any]) -> Float64s:
    """One advantage per trajectory; trajectories with the same prompt uid are a group, wherever they stand.

    >>> advantages("rloo", [1.0, 0.0, 0.0, 5.0, 5.0], ["a", "a", "a", "b", "b"]).tolist()
    [1.0, -0.5, -0.5, 0.0, 0.0]
    """
    if estimator not in ESTIMATORS:
        raise UserError(f"estimator {estimator!r} is not known; known are {', '.join(ESTIMATORS)}")
    returns = np.asarray(returns_G, np.float64)
    if len(returns) != len(prompt_uids_G):
        raise ValueError(f"{len(returns)} returns for {len(prompt_uids_G)} prompt uids")
    code: dict[Any, int] = {}
    uids = prompt_uids_G.tolist() if isinstance(prompt_uids_G, np.ndarray) else prompt_uids_G
    group_G = np.array([code.setdefault(uid, len(code)) for uid in uids], np.int64)
    return ESTIMATORS[estimator](returns, group_G)


def returns(steps: Steps, ends: Ends, rule: ReturnRule) -> Float64s:
    """Per trajectory end its return: `last`, the end's reward, or `sum`, the rewards of its steps."""
    if rule == "last" or not len(ends):
        return ends.reward_E
    number_X, _ = trajectories(
        np.concatenate((ends.ordinal_E, steps.ordinal_K)),
        np.concatenate((ends.sample_E, steps.sample_K)),
        np.concatenate((ends.attempt_E, steps.attempt_K)),
    )
    sum_G = np.bincount(number_X[len(ends) :], steps.reward_K, minlength=int(number_X.max()) + 1)
    return np.asarray(sum_G[number_X[: len(ends)]], np.float64)


@estimator("grpo")
def grpo(returns_G: Float64s, group_G: Int64s) -> Float64s:
    """Distance from the group's mean in standard deviations (arXiv 2402.03300)."""
    count_G, mean_G = _baseline(returns_G, group_G)
    squares_P = np.bincount(group_G, (returns_G - mean_G) ** 2)
    std_G = np.where(count_G > 1, np.sqrt(squares_P[group_G] / np.maximum(count_G - 1, 1)), 1.0)
    return np.asarray((returns_G - mean_G) / (std_G + EPSILON))


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
    """Distance from the group's mean in units of that mean."""
    count_G, mean_G = _baseline(returns_G, group_G)
    return np.where(count_G > 1, (returns_G - mean_G) / (mean_G + EPSILON), returns_G)


@estimator("reinforce++_baseline")
def reinforce_plus_plus_baseline(returns_G: Float64s, group_G: Int64s) -> Float64s:
    """Distance from the group's mean, whitened over the mini-batch (arXiv 2501.03262)."""
    distance_G = returns_G - _baseline(returns_G, group_G)[1]
    if len(distance_G) < 2:
        return distance_G
    return np.asarray((distance_G - distance_G.mean()) / (distance_G.std(ddof=1) + WHITEN_EPSILON))


@estimator("reinforce++")
def reinforce_plus_plus(returns_G: Float64s, group_G: Int64s) -> Float64s:
    """The return as it is: the learner discounts it along the tokens and whitens it (service.learn.advantage)."""
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
