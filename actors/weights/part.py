"""A rank's part of a weights file: the bytes that the rank holds, one after another, and where each lies in the file.

    file     | header | a: rows 0 1 | a: rows 2 3 | b: row 0 | b: row 1 |
    rank 0   | header | a: rows 0 1 |             | b: row 0 |                part: header, rows 0 1 of a, row 0 of b
    rank 1                          | a: rows 2 3 |          | b: row 1 |     part: rows 2 3 of a, row 1 of b

A bucket is a stretch of one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Part:
    """Spans of a file, in the order in which they lie there; P of them."""

    start_P: NDArray[np.int64]
    """First byte of each span in the file."""
    end_P: NDArray[np.int64]
    """Bytes of the part up to the end of each span."""

    @staticmethod
    def of_spans(spans: Sequence[tuple[int, int]]) -> Part:
        """From the first byte and the bytes of each span; those that touch become one.

        >>> Part.of_spans([(0, 8), (8, 4), (20, 4)]).spans(0, 16)
        [(0, 12), (20, 4)]
        """
        joined = list[tuple[int, int]]()
        for start, n_bytes in spans:
            if joined and sum(joined[-1]) == start:
                start, n_bytes = joined[-1][0], joined.pop()[1] + n_bytes
            joined.append((start, n_bytes))
        starts, sizes = [start for start, _ in joined], [n_bytes for _, n_bytes in joined]
        return Part(np.array(starts, np.int64), np.array([*accumulate(sizes)], np.int64))

    @staticmethod
    def whole(n_bytes: int) -> Part:
        """All of a file."""
        return Part.of_spans([(0, n_bytes)])

    @property
    def n_bytes(self) -> int:
        """Bytes of the part."""
        return int(self.end_P[-1]) if len(self.end_P) else 0

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where these bytes of the part lie: the first byte in the file, and how many follow, of each span.

        >>> Part.of_spans([(0, 8), (20, 4)]).spans(6, 10)
        [(6, 2), (20, 2)]
        """
        first = int(np.searchsorted(self.end_P, start, side="right"))
        last = int(np.searchsorted(self.end_P, stop)) + 1
        found, at = list[tuple[int, int]](), start
        for begins, end in zip(self.start_P[first:last].tolist(), self.end_P[first:last].tolist(), strict=True):
            if at >= stop:
                break
            begin_of_span = 0 if first == 0 else int(self.end_P[first - 1])
            found.append((begins + at - begin_of_span, min(end, stop) - at))
            at, first = end, first + 1
        return found


def alike(one: Sequence[Part], other: Sequence[Part]) -> bool:
    """Whether each rank has the same bytes of the file in both.

    >>> alike([Part.whole(8)], [Part.whole(8)]), alike([Part.whole(8)], [Part.of_spans([(4, 4)]), Part.whole(4)])
    (True, False)
    """
    return len(one) == len(other) and all(
        np.array_equal(a.start_P, b.start_P) and np.array_equal(a.end_P, b.end_P)
        for a, b in zip(one, other, strict=True)
    )


def check_parts(parts: Sequence[Part]) -> None:
    """See that these are each byte of one file once.

    Raises:
        ValueError: some bytes are missing, or are there twice.
    """
    start_P = np.concatenate([part.start_P for part in parts])
    size_P = np.concatenate([np.diff(part.end_P, prepend=0) for part in parts])
    order_P = np.argsort(start_P)
    expected_P = np.cumsum(size_P[order_P]) - size_P[order_P]
    if not np.array_equal(start_P[order_P], expected_P):
        raise ValueError("the parts of the ranks are not each byte of the weights once")
