"""Which tokens several sequences begin with in common: a tree in which every sequence is a path.

    [1 2 3 4], then [1 2 7], then [1 2 3 4 5]

    1 2 3 4 5
       \\ 7          [1 2 7] branches off at length 2; what goes on from the end of a run lengthens it

Equal sequences end at the same place, so comparing two costs nothing but the way up to where they part; and following
a sequence costs what it shares, however many others there are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from service.types import Int32s


class Run:
    """Tokens that follow one another from `begin` on; a branch begins after any of them."""

    __slots__ = ("above", "begin", "branches", "end", "firsts", "ids", "level", "owners")

    def __init__(self, above: Run | None, begin: int, ids: Int32s) -> None:
        self.above = self if above is None else above
        self.level: int = 0 if above is None else above.level + 1
        self.begin = begin
        self.end = begin + len(ids)
        self.ids = ids
        """The tokens, and room for more after them."""
        self.branches: dict[int, dict[int, Run]] = {}
        """By length from the root, then by first token."""
        self.firsts: list[int] = []
        """Where what each owner brought begins."""
        self.owners: list[int] = []

    def lengthen(self, ids: Int32s) -> None:
        """Add tokens at the end, in time that depends on those alone."""
        used, needed = self.end - self.begin, self.end - self.begin + len(ids)
        if needed > len(self.ids):
            room = np.empty(max(needed, 2 * used), np.int32)
            room[:used] = self.ids[:used]
            self.ids = room
        self.ids[used:needed] = ids
        self.end += len(ids)


class Place(NamedTuple):
    """The end of the `length` first tokens of a path; it lies inside the run or at its end, or is the root."""

    run: Run
    length: int

    def before(self, length: int) -> Place:
        """The place on the way here that is so many tokens from the root."""
        run = self.run
        while length <= run.begin and run.level:
            run = run.above
        return Place(run, length)

    def shared_with(self, others: Iterable[Place]) -> list[int]:
        """How many tokens the ways here and to each of some other places share."""
        lengths = {self.run: self.length}
        run = self.run
        while run.level:
            lengths[run.above] = run.begin
            run = run.above
        found = []
        for other, length in others:
            while other not in lengths:
                other, length = other.above, other.begin
            found.append(min(length, lengths[other]))
        return found

    def is_on_the_way_to(self, place: Place) -> bool:
        """Whether what ends there begins with what ends here."""
        return self.length <= place.length and place.before(self.length) == self

    @property
    def owner(self) -> int:
        """Who first brought the last token before this place, which is not the root."""
        return self.run.owners[bisect_right(self.run.firsts, self.length - 1) - 1]

    def brought_below(self, bound: int) -> Place:
        """The last place on the way here before which somebody with a number below `bound` brought the token."""
        place = self
        while place.length and place.owner >= bound:
            run = place.run
            place = place.before(run.firsts[bisect_right(run.firsts, place.length - 1) - 1])
        return place

    @property
    def goes_on(self) -> bool:
        """Whether some path leads on from here."""
        return self.length < self.run.end or bool(self.run.branches.get(self.length))


class Tree:
    """Sequences of tokens by what they begin with."""

    def __init__(self) -> None:
        self.root = Place(Run(None, 0, np.zeros(0, np.int32)), 0)
        self._tried: list[tuple[Run, int]] | None = None

    def follow(self, place: Place, ids: Int32s) -> Place:
        """How far the tree has these tokens after a place."""
        (run, length), done = place, 0
        while True:
            shared = common_prefix(run.ids[length - run.begin : run.end - run.begin], ids[done:])
            length, done = length + shared, done + shared
            branches = run.branches.get(length) if done < len(ids) else None
            if branches is None or (branch := branches.get(int(ids[done]))) is None:
                return Place(run, length)
            run = branch

    def grow(self, place: Place, ids: Int32s, owner: int) -> Place:
        """Let tokens that the tree does not have follow a place; returns where they end."""
        run, length = place
        if not len(ids):
            return place
        if length == run.end:
            run.lengthen(ids)
        else:
            above, run = run, Run(run, length, ids)
            above.branches.setdefault(length, {})[int(ids[0])] = run
        run.firsts.append(length)
        run.owners.append(owner)
        if self._tried is not None:
            self._tried.append((run, length))
        return Place(run, length + len(ids))

    def try_out(self) -> None:
        """What grows from now on goes again with `undo`."""
        self._tried = []

    def undo(self) -> None:
        """Take away what grew since `try_out`."""
        for run, length in reversed(self._tried or ()):
            run.firsts.pop()
            run.owners.pop()
            run.end = length
            if run.level and length == run.begin:
                del run.above.branches[length][int(run.ids[0])]
        self._tried = None


def common(a: Place, b: Place) -> int:
    """How many tokens the ways to two places share."""
    (run, length), (other, other_length) = a, b
    while run is not other:
        if run.level >= other.level:
            length, run = run.begin, run.above
        else:
            other_length, other = other.begin, other.above
    return min(length, other_length)


def common_prefix(a: Int32s, b: Int32s) -> int:
    """How many leading tokens two sequences share, in time that depends on those alone.

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
