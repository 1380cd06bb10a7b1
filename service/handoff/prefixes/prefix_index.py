"""Index of one trajectory's steps by prefix: finds the earlier step that shares the longest prefix with a prompt.

    step 0  prompt [10 20 30]                              response [40 50]
    step 1  prompt (first 5 tokens of step 0) [60 70]      response [80 90]
    step 2  prompt (first 6 tokens of step 1) [71]         response [81]

    tokens of step 2       [10 20 30 40 50] of step 0, [60] of step 1, [71 81] of its own
    prompt [10 20 30 41]   shares 3 tokens with step 0

The time to add a step is proportional to its own tokens, wherever it branches off; the time to look up a prompt is
proportional to its length. The tokens lie in a radix tree (`Tree`) in which every step is a path from the root:

    [1 2 3 4], then [1 2 7], then [1 2 3 4 5]

    1 2 3 4 5          one edge (`Run`); the third sequence lengthened it
       \\ 7             an edge of its own, which branches off at length 2

Equal sequences end at the same place of the tree. The time to find how many leading tokens two sequences share is
proportional to the number of edges between their last tokens and the place where they part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from service.columns import digest, token_bytes
from service.handoff.steps.tables import extension_of, name_of
from service.types import Bools, Extension, Int32s, Steps


class PrefixError(ValueError):
    """Raised if a step's reference is to tokens that do not exist, or to tokens with another digest than the
    reference."""


class IndexedStep(NamedTuple):
    """A step in the index. It owns its tokens from position `cut` on; the tokens before are owned by earlier steps."""

    steps: Steps
    own_start: int
    """Position of the step's first own token on the table's token axis."""
    cut: int
    """Number of the step's leading tokens that belong to earlier steps."""
    parent: IndexedStep | None
    """The step whose own tokens include the last extended token."""
    branch: Place
    """The place at which the step's path leaves the paths of earlier steps in the tree."""
    tip: Place
    """The place at which the step's path ends in the tree, after the step's prompt and response."""
    digests: dict[int, xxhash.xxh3_64]
    """Running digests of the first n tokens, by n; each is computed when first needed."""

    def holder(self, length: int) -> IndexedStep:
        """The step that owns the token at position `length` - 1 of this step: this step itself, or an earlier step."""
        step = self
        while length <= step.cut and step.parent is not None:
            step = step.parent
        return step

    def digest(self, length: int) -> xxhash.xxh3_64:
        """The running digest of the first `length` tokens, the last of which belongs to this step."""
        if length not in self.digests:
            running = self.digests[self.cut].copy()
            running.update(token_bytes(self.steps.token_ids_N[self.own_start : self.own_start + length - self.cut]))
            self.digests[length] = running
        return self.digests[length]

    def segments(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The segments (start, stop) of the token axis in which the tokens `start:stop` of the step's prompt and
        response lie. The step, and the earlier steps that own some of its tokens, must be in one table."""
        step, found = self, list[tuple[int, int]]()
        while start < stop:
            step = step.holder(stop)
            low = max(start, step.cut)
            found.append((step.own_start + low - step.cut, step.own_start + stop - step.cut))
            stop = low
        return found[::-1]


class PrefixIndex:
    """An index of one trajectory's steps, by prefix."""

    def __init__(self, arrived: Iterable[tuple[Steps, int]] = ()) -> None:
        """`arrived`: steps to index at once, each as (table, position in the table), in any order."""
        self.count = 0
        """Number of steps that arrived."""
        self._tree = Tree()
        self._steps: dict[int, IndexedStep] = {}
        self._waiting: dict[int, list[tuple[Steps, int]]] = {}
        """Steps that arrived before the step that they extend, by the index of the extended step."""
        for item in arrived:
            self.arrived(*item)

    def add(self, steps: Steps, k: int) -> IndexedStep:
        """Add step `k` of a table to the index.

        Raises:
            PrefixError: the extended step is not in the index, or has other tokens.
        """
        return self._insert(steps, k, extension_of(steps, k), int(steps.offsets_K[k]))

    def arrived(self, steps: Steps, k: int) -> None:
        """Add step `k` of a table to the index now, or once the step that it extends has arrived.

        A step with a wrong reference is left out; its trajectory is refused when the trajectory is complete.
        """
        self.count += 1
        coming = [(steps, k)]
        while coming:
            steps, k = coming.pop()
            if (parent := int(steps.extends_K[k])) >= 0 and parent not in self._steps:
                self._waiting.setdefault(parent, []).append((steps, k))
                continue
            with suppress(PrefixError):
                self.add(steps, k)
                coming += self._waiting.pop(int(steps.index_K[k]), ())

    def tokens(self, index: int) -> Int32s | None:
        """A step's whole prompt and response; None if the step is not in the index."""
        return self._steps[index].tip.tokens() if index in self._steps else None

    def references(
        self, steps: Steps, items: list[int], wanted_K: Bools, known: Mapping[int, Extension]
    ) -> dict[int, Extension]:
        """References for the wanted steps of a table, by position in the table: the reference in `known`, or else one
        to the longest prefix that the step's prompt shares with an earlier step.

        `items`: positions of the steps of one trajectory, sorted by step index. These steps are also compared with one
        another, but are not kept in the index.
        """
        found: dict[int, Extension] = {}
        tried = list[int]()
        self._tree.begin_trial()
        for k in items:
            if (index := int(steps.index_K[k])) in self._steps:
                continue
            extends, own_start = extension_of(steps, k), int(steps.offsets_K[k])
            if wanted_K[k] and (reference := known.get(k) or self._nearest(steps, k)) is not None:
                found[k] = extends = reference
                own_start += reference.length
            with suppress(PrefixError):
                self._insert(steps, k, extends, own_start)
                tried.append(index)
        self._tree.undo_trial()
        for index in tried:
            del self._steps[index]
        return found

    def _insert(self, steps: Steps, k: int, extends: Extension | None, own_start: int) -> IndexedStep:
        index, parent, cut, place, before = int(steps.index_K[k]), None, 0, self._tree.root, xxhash.xxh3_64()
        if extends is not None:
            if (extended := self._steps.get(extends.step)) is None:
                raise PrefixError(f"{name_of(steps, k)} extends step {extends.step}, which is not there")
            if (cut := extends.length) <= extended.tip.length:
                parent, place = extended.holder(cut), extended.tip.before(cut)
                before = parent.digest(cut)
            if parent is None or before.intdigest() != extends.digest:
                raise PrefixError(f"{name_of(steps, k)} extends other tokens than step {extends.step} has")
        own = steps.token_ids_N[own_start : int(steps.offsets_K[k + 1])]
        branch = self._tree.follow(place, own)
        tip = self._tree.grow(branch, own[branch.length - cut :], index)
        step = self._steps[index] = IndexedStep(steps, own_start, cut, parent, branch, tip, {cut: before})
        return step

    def _nearest(self, steps: Steps, k: int) -> Extension | None:
        """A reference to the earlier step that shares the longest prefix with a full prompt; the latest of several."""
        index, start = int(steps.index_K[k]), int(steps.offsets_K[k])
        prompt = steps.token_ids_N[start : start + int(steps.prompt_length_K[k])]
        place = self._reached(index, prompt)
        shared: dict[int, int] = {}
        if (owned := place.owned_below(index)).length:
            shared[owned.owner] = owned.length
        if index - 1 in self._steps:
            shared[index - 1] = common(self._steps[index - 1].tip, place)
        length, step = max(((length, step) for step, length in shared.items()), default=(0, -1))
        if not length:
            return None
        return Extension(step, length, self._steps[step].holder(length).digest(length).intdigest())

    def _reached(self, index: int, prompt: Int32s) -> Place:
        """The longest prefix of a prompt that the tree contains; a prefix that the step before it also extends is
        recognised by its digest."""
        before, place = self._steps.get(index - 1), self._tree.root
        if before is None or not 0 < before.cut <= len(prompt):
            return self._tree.follow(place, prompt)
        if digest(prompt[: before.cut]) == before.digests[before.cut].intdigest():
            place = before.tip.before(before.cut)
        return self._tree.follow(place, prompt[place.length :])


def check_references(steps: Steps) -> None:
    """Raise a PrefixError unless each step's reference is to tokens that exist and have the reference's digest. The
    steps are of one trajectory, sorted by index."""
    index = PrefixIndex()
    for k in range(len(steps)):
        index.add(steps, k)


def check_chain(steps: Steps, first_K: Bools, chain_K: Bools) -> None:
    """Raise a PrefixError unless each step in `chain_K` carries the digest of the whole step before it; steps in
    `first_K` begin a row and need none. Each token is read once."""
    view, offsets = token_bytes(steps.token_ids_N), (4 * steps.offsets_K).tolist()
    digests, firsts, chain = steps.extends_digest_K.tolist(), first_K.tolist(), xxhash.xxh3_64()
    for k in np.flatnonzero(chain_K).tolist():
        if firsts[k]:
            chain = xxhash.xxh3_64()
        elif chain.intdigest() != digests[k]:
            raise PrefixError(f"{name_of(steps, k)} extends other tokens than step {steps.extends_K[k]} has")
        chain.update(view[offsets[k] : offsets[k + 1]])


# -- the tree of tokens -----------------------------------------------------------------------------------------------


class Run:
    """An edge of the radix tree: consecutive tokens, of which the first is at depth `begin`."""

    __slots__ = ("above", "begin", "branches", "end", "ids", "level", "owners", "starts")

    def __init__(self, above: Run | None, begin: int, ids: Int32s) -> None:
        self.above = self if above is None else above
        self.level: int = 0 if above is None else above.level + 1
        self.begin = begin
        self.end = begin + len(ids)
        self.ids = ids
        """The tokens, and free space after them."""
        self.branches: dict[int, dict[int, Run]] = {}
        """The edges that branch off, by depth, then by first token."""
        self.starts: list[int] = []
        """Depth at which each owner's tokens begin."""
        self.owners: list[int] = []

    def lengthen(self, ids: Int32s) -> None:
        """Add tokens at the end of the edge; the amortised time is proportional to the number of new tokens."""
        used, needed = self.end - self.begin, self.end - self.begin + len(ids)
        if needed > len(self.ids):
            room = np.empty(max(needed, 2 * used), np.int32)
            room[:used] = self.ids[:used]
            self.ids = room
        self.ids[used:needed] = ids
        self.end += len(ids)


class Place(NamedTuple):
    """A position in the radix tree: the end of a path of `length` tokens from the root."""

    run: Run
    length: int

    def before(self, length: int) -> Place:
        """The place at which the first `length` tokens of this path end."""
        run = self.run
        while length <= run.begin and run.level:
            run = run.above
        return Place(run, length)

    def tokens(self) -> Int32s:
        """The tokens on the path from the root to this place."""
        run, stop = self
        parts = list[Int32s]()
        while stop:
            parts.append(run.ids[: stop - run.begin])
            run, stop = run.above, run.begin
        return np.concatenate([np.zeros(0, np.int32), *reversed(parts)])

    @property
    def owner(self) -> int:
        """The number of the sequence that first added the token before this place. The place must not be the root."""
        return self.run.owners[bisect_right(self.run.starts, self.length - 1) - 1]

    def owned_below(self, bound: int) -> Place:
        """The longest prefix of this path whose last token was first added by a sequence with a number below
        `bound`."""
        place = self
        while place.length and place.owner >= bound:
            run = place.run
            place = place.before(run.starts[bisect_right(run.starts, place.length - 1) - 1])
        return place


class Tree:
    """A radix tree of token sequences."""

    def __init__(self) -> None:
        self.root = Place(Run(None, 0, np.zeros(0, np.int32)), 0)
        self._grown: list[tuple[Run, int]] | None = None

    def follow(self, place: Place, ids: Int32s) -> Place:
        """Follow tokens from `place` as far as the tree contains them; returns the place that is reached."""
        (run, length), done = place, 0
        while True:
            shared = common_prefix(run.ids[length - run.begin : run.end - run.begin], ids[done:])
            length, done = length + shared, done + shared
            branches = run.branches.get(length) if done < len(ids) else None
            if branches is None or (branch := branches.get(int(ids[done]))) is None:
                return Place(run, length)
            run = branch

    def grow(self, place: Place, ids: Int32s, owner: int) -> Place:
        """Add the tokens `ids` after `place`, where the tree does not contain them yet, for the sequence with the
        number `owner`; returns the place after the last token."""
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
        """Remember all tokens that are added from now on, so that `undo_trial` can remove them."""
        self._grown = []

    def undo_trial(self) -> None:
        """Remove the tokens that were added since `begin_trial`."""
        for run, length in reversed(self._grown or ()):
            run.starts.pop()
            run.owners.pop()
            run.end = length
            if run.level and length == run.begin:
                del run.above.branches[length][int(run.ids[0])]
        self._grown = None


def common(a: Place, b: Place) -> int:
    """Number of leading tokens that two paths share. The time is proportional to the number of edges between the place
    where the paths part and their last tokens."""
    (run, length), (other, other_length) = a, b
    while run is not other:
        if run.level >= other.level:
            length, run = run.begin, run.above
        else:
            other_length, other = other.begin, other.above
    return min(length, other_length)


def common_prefix(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Number of leading items that two sequences share; the time is proportional to this number.

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
