"""The steps of one trajectory by their prefixes: which earlier step has the tokens that a prompt begins with.

    step 0  prompt [10 20 30]                 response [40 50]
    step 1  extends step 0 by 5 tokens, prompt [60 70], response [80 90]
    step 2  extends step 1 by 6 tokens, prompt [71],    response [81]

    tokens of step 2       [10 20 30 40 50] of step 0, [60] of step 1, [71 81] of its own
    prompt [10 20 30 41]   shares 3 tokens with step 0

Adding a step costs what its own tokens cost, wherever it branches off; looking a prompt up costs what the prompt costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import xxhash
from numpy.typing import NDArray

from service.columns import Column, columns_of, digest, filled, token_bytes
from service.handoff.prefixes.tree import Place, Tree, common
from service.handoff.steps.tables import extension_of, name_of
from service.types import Bools, Extension, Int32s, Steps

PROMPT_COLUMNS = tuple(column for column in columns_of(Steps).tokens if column.about.on_prompt and column.optional)
"""Columns in which tokens of a prompt have values too: equal token ids alone do not make a prefix shared."""


class PrefixError(ValueError):
    """A step extends tokens that are not there, or other tokens than it names."""


class IndexedStep(NamedTuple):
    """A step in the index: its own tokens begin at `cut`, those before them belong to `parent` and its parents."""

    steps: Steps
    own_start: int
    """Where in the table the step's own tokens begin."""
    cut: int
    """How many tokens of earlier steps it extends."""
    parent: IndexedStep | None
    """The step whose own tokens include the last extended one."""
    branch: Place
    """Where the step leaves what the tree had before it."""
    tip: Place
    """Where its prompt and response end."""
    digests: dict[int, xxhash.xxh3_64]
    """Running digests of the first tokens, by length, as far as they were needed."""

    def holder(self, length: int) -> IndexedStep:
        """The step whose own tokens include the last of the first `length` ones."""
        step = self
        while length <= step.cut and step.parent is not None:
            step = step.parent
        return step

    def digest(self, length: int) -> xxhash.xxh3_64:
        """The running digest of the first `length` tokens, the last of which is an own one."""
        if length not in self.digests:
            running = self.digests[self.cut].copy()
            running.update(token_bytes(self.steps.token_ids_N[self.own_start : self.own_start + length - self.cut]))
            self.digests[length] = running
        return self.digests[length]

    def segments(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where the tokens `start:stop` of prompt and response lie on the token axis, if all steps are of one table."""
        step, found = self, list[tuple[int, int]]()
        while start < stop:
            step = step.holder(stop)
            low = max(start, step.cut)
            found.append((step.own_start + low - step.cut, step.own_start + stop - step.cut))
            stop = low
        return found[::-1]


class PrefixIndex:
    """The steps of one trajectory so far."""

    def __init__(self) -> None:
        self.count = 0
        """Steps that arrived."""
        self._tree = Tree()
        self._steps: dict[int, IndexedStep] = {}
        self._waiting: dict[int, list[tuple[Steps, int]]] = {}
        """Steps that arrived before the step that they extend, by that step's index."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Shape of one token's values in each of `PROMPT_COLUMNS`, once some step has the column."""

    def add(self, steps: Steps, k: int) -> IndexedStep:
        """Index item `k` of a table.

        Raises:
            PrefixError: the step that it extends is not here, or has other tokens.
        """
        return self._insert(steps, k, extension_of(steps, k), int(steps.offsets_K[k]))

    def arrived(self, steps: Steps, k: int) -> None:
        """Index item `k` of a table, at the latest when the step that it extends has arrived.

        A reference that does not hold leaves the step out: the trajectory is refused when it is complete.
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
        """A step's whole prompt and response; None if it is not here."""
        return self._steps[index].tip.tokens() if index in self._steps else None

    def references(
        self, steps: Steps, items: list[int], wanted_K: Bools, known: Mapping[int, Extension]
    ) -> dict[int, Extension]:
        """The longest prefix that each wanted item shares with an earlier step, or the reference that is known.

        The items are sorted by index. They are also compared with one another, but none of them stays in the index.
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
        for column in PROMPT_COLUMNS:
            if (array := getattr(steps, column.name)) is not None:
                self._shapes.setdefault(column.name, array.shape[1:])
        return step

    def _nearest(self, steps: Steps, k: int) -> Extension | None:
        """The earlier step with which a full prompt shares most; of several, the latest."""
        index, start = int(steps.index_K[k]), int(steps.offsets_K[k])
        prompt = steps.token_ids_N[start : start + int(steps.prompt_length_K[k])]
        place = self._reached(index, prompt)
        shared: dict[int, int] = {}
        if (owned := place.owned_below(index)).length:
            shared[owned.owner] = owned.length
        if index - 1 in self._steps:
            shared[index - 1] = common(self._steps[index - 1].tip, place)
        for column in PROMPT_COLUMNS:
            array = getattr(steps, column.name)
            shape = self._shapes.get(column.name) if array is None else array.shape[1:]
            if shape is not None:
                here_T = _values(column, steps, start, start + len(prompt), shape)
                shared = {step: self._equal(column, step, length, here_T) for step, length in shared.items()}
        length, step = max(((length, step) for step, length in shared.items()), default=(0, -1))
        if not length:
            return None
        return Extension(step, length, self._steps[step].holder(length).digest(length).intdigest())

    def _reached(self, index: int, prompt: Int32s) -> Place:
        """How far the tree has a prompt; tokens that the step before it extends too are recognised by their digest."""
        before, place = self._steps.get(index - 1), self._tree.root
        if before is None or not 0 < before.cut <= len(prompt):
            return self._tree.follow(place, prompt)
        if digest(prompt[: before.cut]) == before.digests[before.cut].intdigest():
            place = before.tip.before(before.cut)
        return self._tree.follow(place, prompt[place.length :])

    def _equal(self, column: Column, index: int, length: int, here_T: NDArray[Any]) -> int:
        """How many of the shared tokens have the same values in a column, so that a reference loses nothing."""
        step: IndexedStep | None = self._steps[index]
        stop = equal = length
        while stop and step is not None:
            step = step.holder(stop)
            there_T = _values(column, step.steps, step.own_start, step.own_start + stop - step.cut, here_T.shape[1:])
            if there_T.shape[1:] != here_T.shape[1:]:
                return 0  # the message will be refused for that
            differs_T = (there_T != here_T[step.cut : stop]).reshape(len(there_T), -1).any(axis=1)
            if differs_T.any():
                equal = step.cut + int(differs_T.argmax())
            stop, step = step.cut, step.parent
        return equal


def _values(column: Column, steps: Steps, start: int, stop: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """A column's values on some tokens; the fill value where the table lacks the column."""
    array: NDArray[Any] | None = getattr(steps, column.name)
    return filled(column, stop - start, shape) if array is None else array[start:stop]
