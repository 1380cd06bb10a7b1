"""Which leading tokens several sequences share: a radix tree in which every sequence is a path from the root.

    [1 2 3 4], then [1 2 7], then [1 2 3 4 5]

    1 2 3 4 5          one run; the third sequence lengthened it
       \\ 7             a run of its own, which branches off at length 2

Equal sequences end at the same place, so comparing two costs the way from their ends up to where they part. Following a
sequence costs what it shares with the tree, however many other sequences there are.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from service.types import Int32s


class Run:
    """Tokens that follow one another from length `begin` on; a branch may begin after any of them."""

    __slots__ = ("above", "begin", "branches", "end", "ids", "level", "owners", "starts")

    def __init__(self, above: Run | None, begin: int, ids: Int32s) -> None:
        self.above = self if above is None else above
        self.level: int = 0 if above is None else above.level + 1
        self.begin = begin
        self.end = begin + len(ids)
        self.ids = ids
        """The tokens, and free space after them."""
        self.branches: dict[int, dict[int, Run]] = {}
        """By length from the root, then by first token."""
        self.starts: list[int] = []
        """Length at which each owner's tokens begin."""
        self.owners: list[int] = []

    def lengthen(self, ids: Int32s) -> None:
        """Add tokens at the end; amortised, the cost is that of the new tokens."""
        used, needed = self.end - self.begin, self.end - self.begin + len(ids)
        if needed > len(self.ids):
            room = np.empty(max(needed, 2 * used), np.int32)
            room[:used] = self.ids[:used]
            self.ids = room
        self.ids[used:needed] = ids
        self.end += len(ids)


class Place(NamedTuple):
    """Where the sequence of a path's first `length` tokens ends: inside the run, at its end, or at the root."""

    run: Run
    length: int

    def before(self, length: int) -> Place:
        """The place of the path's first `length` tokens."""
        run = self.run
        while length <= run.begin and run.level:
            run = run.above
        return Place(run, length)

    def tokens(self, start: int = 0) -> Int32s:
        """The path's tokens from `start` on."""
        run, stop = self
        parts = list[Int32s]()
        while stop > start:
            parts.append(run.ids[max(start - run.begin, 0) : stop - run.begin])
            run, stop = run.above, run.begin
        return np.concatenate([np.zeros(0, np.int32), *reversed(parts)])

    def is_prefix_of(self, place: Place) -> bool:
        """Whether the path to `place` begins with this one."""
        return self.length <= place.length and place.before(self.length) == self

    @property
    def owner(self) -> int:
        """The sequence that first brought the last token before this place, which is not the root."""
        return self.run.owners[bisect_right(self.run.starts, self.length - 1) - 1]

    def owned_below(self, bound: int) -> Place:
        """The longest prefix of this path whose last token has an owner with a number below `bound`."""
        place = self
        while place.length and place.owner >= bound:
            run = place.run
            place = place.before(run.starts[bisect_right(run.starts, place.length - 1) - 1])
        return place

    @property
    def has_more(self) -> bool:
        """Whether some path goes on from here."""
        return self.length < self.run.end or bool(self.run.branches.get(self.length))


class Tree:
    """Sequences of tokens by their prefixes."""

    def __init__(self) -> None:
        self.root = Place(Run(None, 0, np.zeros(0, np.int32)), 0)
        self._grown: list[tuple[Run, int]] | None = None

    def follow(self, place: Place, ids: Int32s) -> Place:
        """The place that these tokens lead to from `place`, as far as the tree has them."""
        (run, length), done = place, 0
        while True:
            shared = common_prefix(run.ids[length - run.begin : run.end - run.begin], ids[done:])
            length, done = length + shared, done + shared
            branches = run.branches.get(length) if done < len(ids) else None
            if branches is None or (branch := branches.get(int(ids[done]))) is None:
                return Place(run, length)
            run = branch

    def grow(self, place: Place, ids: Int32s, owner: int) -> Place:
        """Add tokens after a place, where the tree does not have them yet; returns where they end."""
        run, length = place
        if not len(ids):
            return place
        if length == run.end:
            run.lengthen(ids)
        else:
            above, run = run, Run(run, length, ids)
            above.branches.setdefault(length, {})[int(ids[0])] = run
        run.starts.append(length)
        run.owners.append(owner)
        if self._grown is not None:
            self._grown.append((run, length))
        return Place(run, length + len(ids))

    def begin_trial(self) -> None:
        """From now on, remember what is added until `undo_trial`."""
        self._grown = []

    def undo_trial(self) -> None:
        """Remove what was added since `begin_trial`."""
        for run, length in reversed(self._grown or ()):
            run.starts.pop()
            run.owners.pop()
            run.end = length
            if run.level and length == run.begin:
                del run.above.branches[length][int(run.ids[0])]
        self._grown = None


def common(a: Place, b: Place) -> int:
    """How many leading tokens two paths share; costs the way from both ends up to where they part."""
    (run, length), (other, other_length) = a, b
    while run is not other:
        if run.level >= other.level:
            length, run = run.begin, run.above
        else:
            other_length, other = other.begin, other.above
    return min(length, other_length)


def common_prefix(a: Int32s, b: Int32s) -> int:
    """How many leading tokens two sequences share; costs what they share.

    >>> common_prefix(np.array([1, 2, 3, 4], np.int32), np.array([1, 2, 7], np.int32))
    2
    """
    shorter, start, width = min(len(a), len(b)), 0, 64
    while start < shorter:
        stop = min(start + width, shorter)
        differs = a[start:stop] != b[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, width = stop, 4 * width
    return shorter
