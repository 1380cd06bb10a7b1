"""Compares two records of one step; sorts steps and removes duplicates."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.columns import Column, changes, columns_of, filled, of_one_type, select, trajectories
from service.handoff.steps.tables import name_of
from service.types import Int64s, Steps


def same_step(a: Steps, k: int, b: Steps, j: int) -> bool:
    """Whether item `k` of table `a` and item `j` of table `b` are the same step: equal in all columns, bit by bit."""
    a, b = select(a, np.array([k])), select(b, np.array([j]))
    columns = columns_of(Steps)
    if any(getattr(a, names) != getattr(b, names) for names, _ in columns.names):
        return False
    numbers = {code for _, code in columns.names}  # names are compared, not their numbers in a table
    return all(
        _equal(column, getattr(a, column.name), getattr(b, column.name))
        for column in columns.all
        if column.name not in numbers
    )


def in_order(steps: Steps) -> tuple[Steps, Int64s]:
    """The steps, sorted by trajectory (in order of first appearance), then by index, without duplicates; and the number
    of each step's trajectory.

    Raises:
        ValueError: a step came twice with different content.
    """
    number_K, _ = trajectories(steps.group_id_K, steps.sample_K, steps.attempt_K)
    same_K, next_K = number_K[1:] == number_K[:-1], steps.index_K[1:] > steps.index_K[:-1]
    if (next_K | ~same_K).all() and (number_K[1:] >= number_K[:-1]).all():
        return steps, number_K
    order = np.lexsort((steps.index_K, number_K))
    steps, number_K = select(steps, order), number_K[order]
    again_K = ~changes(number_K, steps.index_K)
    if not again_K.any():
        return steps, number_K
    first_K = np.maximum.accumulate(np.where(again_K, 0, np.arange(len(steps))))
    for k in np.flatnonzero(again_K).tolist():
        if not same_step(steps, int(first_K[k]), steps, k):
            raise ValueError(f"{name_of(steps, k)} came twice, and not the same")
    return select(steps, np.flatnonzero(~again_K)), number_K[~again_K]


def _equal(column: Column, a: NDArray[Any] | None, b: NDArray[Any] | None) -> bool:
    """Bitwise equality, so that NaN equals itself; an absent column equals its fill value."""
    if a is None or b is None:
        known = b if a is None else a
        if known is None:
            return True
        return known.tobytes() == np.broadcast_to(filled(column, 1).astype(known.dtype), known.shape).tobytes()
    a, b = of_one_type(column, [a, b])
    return a.shape == b.shape and a.tobytes() == b.tobytes()
