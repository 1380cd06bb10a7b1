"""Estimators: turn the returns of a mini-batch's trajectories into advantages.

`G` runs over trajectories; a group is the trajectories of one prompt. With r a trajectory's return, m and s the mean
and the sample standard deviation of its group's returns, n the size of its group:

| estimator            | advantage                          | zero variance | group of one |
|----------------------|------------------------------------|---------------|--------------|
| `grpo`               | (r - m) / (s + 1e-6)               | 0             | r / (1 + 1e-6) |
| `grpo_no_std`        | r - m                              | 0             | r            |
| `rloo`               | (r - m) n / (n - 1)                | 0             | 0            |
| `maxrl`              | (r - m) / (m + 1e-6); 0 if m + 1e-6 = 0 | 0    | r            |
| `reinforce++_baseline` | x = r - m, then (x - mean) / (std + 1e-8) over the mini-batch | 0 if in all groups | x = r |

MaxRL divides by the mean itself, so it is meant for rewards that are not negative: with m < 0 every advantage has the
opposite sign, and with m = 0 (rewards 1 and -1) advantages are a million times the rewards, as in the publication.

Returns of a group that differ only by rounding (`ROUNDING`) are equal: every estimator gets one value for all of them.

If a group continues without some trajectories, n counts the remaining ones; the configuration refuses groups of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from service.columns import codes_of
from service.errors import UserError
from service.types import Bools, Float64s, Int64s

EPSILON = 1e-6
FINITE = float(np.finfo(np.float32).max)
"""Largest magnitude of an advantage, so that it stays finite in float32."""
ROUNDING = 2.0**-21
"""Returns of a group count as equal if they differ by at most this fraction of their largest magnitude, which counts
as at least 1. This allows four roundings in float32."""

Estimator = Callable[[Float64s, Int64s], Float64s]
"""A function that computes `advantage_G` from `return_G` and the number of each trajectory's group (`group_G`)."""

ESTIMATORS: dict[str, Estimator] = {}

GROUP_ESTIMATORS = ("grpo", "grpo_no_std", "rloo", "maxrl", "reinforce++_baseline")
"""Estimators that compare the trajectories of a group."""
TURN_ESTIMATORS = ("grpo", "grpo_no_std", "rloo")
"""Estimators that can also compute one advantage per turn."""
NOT_BY_TURN = f"is defined on whole returns only; use {', '.join(TURN_ESTIMATORS)}"
"""Why another estimator cannot be used per turn, for error messages."""


class NoAdvantage(UserError):
    """Raised if an estimator gives some trajectories no finite advantage."""

    def __init__(self, message: str, trajectories: list[int]) -> None:
        super().__init__(message)
        self.trajectories = trajectories
        """Positions of the trajectories without a finite advantage in `return_G`."""


def estimator(name: str) -> Callable[[Estimator], Estimator]:
    """A decorator that registers an estimator by name; `algorithm.estimator: module:name` imports the module first."""

    def register(function: Estimator) -> Estimator:
        if name in ESTIMATORS:
            raise ValueError(f"there is an estimator {name!r} already")
        ESTIMATORS[name] = function
        return function

    return register


def advantages(estimator: str, return_G: ArrayLike, prompt_uids_G: Sequence[Any] | NDArray[Any]) -> Float64s:
    """One advantage per trajectory; trajectories with the same prompt uid are a group, in any order.

    Raises:
        ValueError: a return is not finite, or returns and prompt uids differ in number.
        NoAdvantage: the estimator gave a value that is not finite.
        UserError: the estimator is unknown, or did not give one advantage per trajectory.

    >>> advantages("rloo", [1.0, 0.0, 0.0, 5.0, 5.0], ["a", "a", "a", "b", "b"]).tolist()
    [1.0, -0.5, -0.5, 0.0, 0.0]
    """
    if (function := ESTIMATORS.get(estimator)) is None:
        raise UserError(f"no estimator is named {estimator!r}; there are {', '.join(ESTIMATORS)}")
    returns = np.array(return_G, np.float64)  # a copy, which an estimator may change
    if returns.shape != (len(prompt_uids_G),):
        raise ValueError(f"returns of shape {returns.shape} for {len(prompt_uids_G)} prompt uids")
    if not (finite_G := np.isfinite(returns)).all():
        raise ValueError(f"return_G[{finite_G.argmin()}] is {returns[finite_G.argmin()]}, not a finite number")
    group_G = codes_of(prompt_uids_G)[1].astype(np.int64)
    advantage_G = np.asarray(function(levelled(returns, group_G), group_G), np.float64)
    problem = f"algorithm.estimator: {estimator!r} gave no finite number for each of {len(returns)} trajectories"
    if advantage_G.shape != returns.shape:
        raise UserError(f"{problem} (shape {advantage_G.shape})")
    if not (fine_G := np.abs(advantage_G) <= FINITE).all():
        g = int(fine_G.argmin())
        raise NoAdvantage(f"{problem}: number {g} has {advantage_G[g]}", np.flatnonzero(~fine_G).tolist())
    return advantage_G


def ranges(return_G: Float64s, group_G: NDArray[np.integer[Any]]) -> tuple[Float64s, Float64s, Bools]:
    """[P], [P], [P] the least and the largest return of each group, and whether its returns are equal but for
    rounding."""
    low_P = np.full(int(group_G.max(initial=-1)) + 1, np.inf)
    high_P = -low_P
    np.minimum.at(low_P, group_G, return_G)
    np.maximum.at(high_P, group_G, return_G)
    scale_P = np.maximum(1.0, np.maximum(np.abs(low_P), np.abs(high_P)))
    return low_P, high_P, high_P - low_P <= ROUNDING * scale_P


def levelled(return_G: Float64s, group_G: NDArray[np.integer[Any]]) -> Float64s:
    """[G] the returns; returns of a group that are equal but for rounding get one value."""
    low_P, _, flat_P = ranges(return_G, group_G)
    return np.where(flat_P[group_G], low_P[group_G], return_G)


@estimator("grpo")
def grpo(return_G: Float64s, group_G: Int64s) -> Float64s:
    """The return minus the group's mean, in standard deviations of the group (arXiv 2402.03300)."""
    return np.asarray(grpo_no_std(return_G, group_G) / (deviation(return_G, group_G) + EPSILON))


def deviation(return_G: Float64s, group_G: Int64s) -> Float64s:
    """Sample standard deviation of the returns of each trajectory's group; 1 for a group of one."""
    count_G, mean_G = _baseline(return_G, group_G)
    squares_P = np.bincount(group_G, (return_G - mean_G) ** 2)
    return np.where(count_G > 1, np.sqrt(squares_P[group_G] / np.maximum(count_G - 1, 1)), 1.0)


@estimator("grpo_no_std")
def grpo_no_std(return_G: Float64s, group_G: Int64s) -> Float64s:
    """The return minus the group's mean (arXiv 2503.20783)."""
    return np.asarray(return_G - _baseline(return_G, group_G)[1])


@estimator("rloo")
def rloo(return_G: Float64s, group_G: Int64s) -> Float64s:
    """The return minus the mean return of the group's other trajectories (arXiv 2402.14740)."""
    count_G, mean_G = _baseline(return_G, group_G)
    scaled_G = (return_G - mean_G) * count_G / np.maximum(count_G - 1, 1)
    return np.where(count_G > 1, scaled_G, 0.0)


@estimator("maxrl")
def maxrl(return_G: Float64s, group_G: Int64s) -> Float64s:
    """The return minus the group's mean, divided by the group's mean (arXiv 2602.02710)."""
    count_G, mean_G = _baseline(return_G, group_G)
    below_G = mean_G + EPSILON
    scaled_G = np.divide(return_G - mean_G, below_G, out=np.zeros_like(return_G), where=below_G != 0)
    return np.where(count_G > 1, scaled_G, return_G)


@estimator("reinforce++_baseline")
def reinforce_plus_plus_baseline(return_G: Float64s, group_G: Int64s) -> Float64s:
    """The return minus the group's mean, whitened over the mini-batch (arXiv 2501.03262)."""
    distance_G = return_G - _baseline(return_G, group_G)[1]
    if len(distance_G) < 2:
        return distance_G
    return np.asarray((distance_G - distance_G.mean()) / (distance_G.std(ddof=1) + 1e-8))


def _baseline(return_G: Float64s, group_G: Int64s) -> tuple[Int64s, Float64s]:
    """[G], [G] size and mean return of each trajectory's group. Mean: 0 in a group of one, exact for equal returns."""
    count_P = np.bincount(group_G)
    first_P = np.zeros(len(count_P))
    first_P[group_G[::-1]] = return_G[::-1]
    above_P = np.bincount(group_G, return_G - first_P[group_G]) / np.maximum(count_P, 1)
    mean_P = np.where(count_P > 1, first_P + above_P, 0.0)
    return count_P[group_G], mean_P[group_G]
