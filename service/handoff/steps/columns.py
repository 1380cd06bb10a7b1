"""Columns of tables: offsets, token segments, trajectories by number, strings by index.

A token column is cut and joined by segments. Segments that lie side by side and stay side by side are copied as one:

    select [0 1 3] of items with offsets [0 5 9 12 20]  ->  copies tokens 0:9 and 12:20
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from service.types import Bools, Int32s, Int64s

Column = TypeVar("Column", bound=np.generic)


def offsets_of(length_X: NDArray[np.integer[Any]]) -> Int64s:
    """Offsets of an axis from its items' lengths: [3 2] -> [0 3 5]."""
    offsets_X = np.zeros(len(length_X) + 1, np.int64)
    np.cumsum(length_X, out=offsets_X[1:])
    return offsets_X


def lengths_of(offsets_X: Int64s) -> Int64s:
    """The items' lengths behind their offsets: [0 3 5] -> [3 2]."""
    return offsets_X[1:] - offsets_X[:-1]


def copy_segments(column_N: NDArray[Column], start_S: Int64s, stop_S: Int64s) -> NDArray[Column]:
    """The segments `start:stop` of a token column, one after the other; a view where they are one piece."""
    if len(start_S) == 0:
        return column_N[:0]
    breaks = np.flatnonzero(start_S[1:] != stop_S[:-1])
    starts = start_S[np.concatenate(([0], breaks + 1))].tolist()
    stops = stop_S[np.concatenate((breaks, [len(stop_S) - 1]))].tolist()
    if len(starts) == 1:
        return column_N[starts[0] : stops[0]]
    return np.concatenate([column_N[start:stop] for start, stop in zip(starts, stops, strict=True)])


def trajectories(group_id_X: Int64s, sample_X: Int32s, attempt_X: Int32s) -> tuple[Int64s, Int64s]:
    """Number the trajectories of a table in order of their first appearance: (number of each item, first items).

    >>> number_K, first_G = trajectories(np.array([7, 3, 7]), np.array([0, 0, 0]), np.array([0, 0, 0]))
    >>> number_K.tolist(), first_G.tolist()
    ([0, 1, 0], [0, 1])
    """
    columns = (group_id_X, sample_X, attempt_X)
    new = _changes(columns)
    head_G = new.nonzero()[0]
    heads = list(zip(*(column[head_G].tolist() for column in columns), strict=True))
    if len(set(heads)) == len(heads):  # each trajectory stands together
        return np.cumsum(new) - 1, head_G
    order = np.lexsort((attempt_X, sample_X, group_id_X))
    new = _changes(tuple(column[order] for column in columns))
    first_G = order[new]
    appearance = np.argsort(first_G, kind="stable")
    rank = np.empty(len(first_G), np.int64)
    rank[appearance] = np.arange(len(first_G))
    number_X = np.empty(len(order), np.int64)
    number_X[order] = rank[np.cumsum(new) - 1]
    return number_X, first_G[appearance]


def _changes(columns: Sequence[NDArray[Any]]) -> Bools:
    """[X] True where an item differs from the one before it."""
    new = np.ones(len(columns[0]), np.bool_)
    changes = new[1:]
    changes[:] = False
    for column in columns:
        changes |= column[1:] != column[:-1]
    return new


def codes_of(strings: Sequence[str]) -> tuple[Int32s, tuple[str, ...]]:
    """Each string's index into the different strings, and those."""
    code: dict[str, int] = {}
    codes = [code.setdefault(string, len(code)) for string in strings]
    return np.array(codes, np.int32), tuple(code)


def joined_codes(parts: Sequence[tuple[tuple[str, ...], Int32s]]) -> tuple[tuple[str, ...], Int32s]:
    """The strings of several tables, each once, and everybody's index into them."""
    code: dict[str, int] = {}
    renumbered = np.array([code.setdefault(string, len(code)) for strings, _ in parts for string in strings], np.int32)
    if not parts:
        return (), renumbered
    start_P = offsets_of(np.array([len(strings) for strings, _ in parts]))[:-1]
    start_X = np.repeat(start_P, [len(code_X) for _, code_X in parts])
    return tuple(code), renumbered[np.concatenate([code_X for _, code_X in parts]) + start_X]


def used_codes(strings: tuple[str, ...], code_X: Int32s) -> tuple[tuple[str, ...], Int32s]:
    """Only the strings that a column uses, and its index into them."""
    if len(strings) <= 1:
        return strings, code_X
    used, renumbered_X = np.unique(code_X, return_inverse=True)
    return tuple(strings[code] for code in used), renumbered_X.astype(np.int32)
