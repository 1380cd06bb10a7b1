"""Compares two records of one step, which may have different forms; sorts steps and removes duplicates.

    full form      prompt [10 20 30 40 50 60 70]               response [80 90]
    shared form    prompt (first 5 tokens of step 0) [60 70]   response [80 90]      the same step

A reference has the digest of the tokens that it replaces, so a full record can be compared with a shared record without
the extended step. Only two references of different lengths need the tokens of an extended step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.columns import Column, changes, columns_of, digest, filled, of_one_type, select, trajectories
from service.handoff.prefixes.prefix_index import PrefixIndex
from service.handoff.steps.tables import NO_EXTENSION, extension_of, name_of, total_lengths
from service.types import Int32s, Int64s, Steps

TokensOf = Callable[[int], Int32s | None]
"""A function from the index of an earlier step of the trajectory to its whole prompt and response; None if unknown."""


def same_step(a: Steps, k: int, b: Steps, j: int, tokens_of: TokensOf) -> bool | None:
    """Whether item `k` of table `a` and item `j` of table `b` are the same step; None if this cannot be decided without
    an earlier step of which `tokens_of` does not know the tokens."""
    a, b = select(a, np.array([k])), select(b, np.array([j]))
    if a.extends_length_K[0] > b.extends_length_K[0]:
        a, b = b, a
    if not _equal_columns(a, b):
        return False
    short, long = extension_of(a, 0) or NO_EXTENSION, extension_of(b, 0) or NO_EXTENSION
    if short.length == long.length:
        return short.digest == long.digest
    between = a.token_ids_N[: long.length - short.length]  # `a` carries these tokens, `b` refers to them
    if not short.length:
        return digest(between) == long.digest
    if (known := tokens_of(short.step)) is not None and digest(known[: short.length]) == short.digest:
        return digest(np.concatenate((known[: short.length], between))) == long.digest
    if (known := tokens_of(long.step)) is not None and digest(known[: long.length]) == long.digest:
        rest = known[short.length : long.length]
        return digest(known[: short.length]) == short.digest and bool((rest == between).all())
    return None


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

    @lru_cache(maxsize=1)
    def index_of(number: int) -> PrefixIndex:
        return PrefixIndex((steps, k) for k in np.flatnonzero((number_K == number) & ~again_K).tolist())

    def tokens_of(number: int) -> TokensOf:
        return lambda step: index_of(number).tokens(step)

    for k in np.flatnonzero(again_K).tolist():
        if not same_step(steps, int(first_K[k]), steps, k, tokens_of(int(number_K[k]))):
            raise ValueError(f"{name_of(steps, k)} came twice, and not the same")
    return select(steps, np.flatnonzero(~again_K)), number_K[~again_K]


def _equal_columns(a: Steps, b: Steps) -> bool:
    """Whether two records, each a table of one step, are equal except for tokens that `b` refers to; `b` has at most as
    many tokens as `a`."""
    columns, own = columns_of(Steps), len(b.token_ids_N)
    response = own - int(b.prompt_length_K[0])
    if total_lengths(a)[0] != total_lengths(b)[0] or len(a.token_ids_N) - int(a.prompt_length_K[0]) != response:
        return False
    if any(getattr(a, names) != getattr(b, names) for names, _ in columns.names):
        return False
    for column in columns.items:
        if column.about.compare == "bits" and not _equal(column, getattr(a, column.name), getattr(b, column.name)):
            return False
    for column in columns.tokens:
        if column.about.compare == "bits":
            # The step's last tokens: those that both records carry, or its response if prompt tokens have no values.
            count = own if column.about.on_prompt else response
            arrays = [getattr(of, column.name) for of in (a, b)]
            if not _equal(column, *(None if array is None else array[len(array) - count :] for array in arrays)):
                return False
    return True


def _equal(column: Column, a: NDArray[Any] | None, b: NDArray[Any] | None) -> bool:
    """Bitwise equality, so that NaN equals itself; an absent column equals its fill value."""
    if a is None or b is None:
        known = b if a is None else a
        if known is None:
            return True
        return known.tobytes() == np.broadcast_to(filled(column, 1).astype(known.dtype), known.shape).tobytes()
    a, b = of_one_type(column, [a, b])
    return a.shape == b.shape and a.tobytes() == b.tobytes()
