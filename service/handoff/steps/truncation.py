"""Responses that were cut at the engine's length limit, by turn.

A step of such a response has the stop reason `length`. A trajectory whose last response was cut, and that nothing else
ended, has the stop reason `truncated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from service.handoff.steps.stop_reason import StopReason
from service.types import Bools, Steps

TURN_BOUNDS = (1, 2, 3, 4, 8, 16, 32)
TURNS = ("1", "2", "3", "4", "5_8", "9_16", "17_32", "33_up")
"""Classes of turns, counted from 1: few, so that each can be a label of a metric."""


def is_truncated_K(steps: Steps) -> Bools:
    """[K] True where the response was cut at the length limit."""
    return np.array([reason == StopReason.LENGTH for reason in steps.stop_reasons], np.bool_)[steps.stop_reason_K]


def by_turn(tables: Sequence[Steps]) -> Iterator[tuple[str, int, int]]:
    """(turns, responses, truncated responses) of each class of turns that has responses."""
    turn_K = np.concatenate([np.searchsorted(TURN_BOUNDS, steps.index_K + 1) for steps in tables])
    truncated_K = np.concatenate([is_truncated_K(steps) for steps in tables])
    responses, truncated = (np.bincount(of_K, minlength=len(TURNS)) for of_K in (turn_K, turn_K[truncated_K]))
    for turns, n_responses, n_truncated in zip(TURNS, responses.tolist(), truncated.tolist(), strict=True):
        if n_responses:
            yield turns, n_responses, n_truncated
