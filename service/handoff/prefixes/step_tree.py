"""The steps of one trajectory as a tree of references: which step carries each token, and whether references are right.

    step 0  prompt [10 20 30]                              response [40 50]
    step 1  prompt (first 5 tokens of step 0) [60 70]      response [80 90]
    step 2  prompt (first 6 tokens of step 1) [71]         response [81]

    tokens of step 2       [10 20 30 40 50] of step 0, [60] of step 1, [71 81] of its own

The time to add a step is proportional to its own tokens, wherever it branches off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from service.columns import token_bytes
from service.handoff.steps.tables import extension_of, name_of
from service.types import Int32s, Steps


class PrefixError(ValueError):
    """Raised if a step's reference is to tokens that do not exist, or to tokens with another digest than the
    reference."""


@dataclass(frozen=True, slots=True, eq=False)
class StepNode:
    """A step in the tree. It owns its tokens from position `cut` on; the tokens before are owned by earlier steps."""

    steps: Steps
    index: int
    own_start: int
    """Position of the step's first own token on the table's token axis."""
    cut: int
    """Number of the step's leading tokens that belong to earlier steps."""
    length: int
    """Number of tokens in the step's whole prompt and response."""
    parent: StepNode | None
    """The step that owns the last extended token."""
    digests: dict[int, xxhash.xxh3_64]
    """Running digests of the first n tokens, by n; each is computed when first needed."""

    def owner(self, length: int) -> StepNode:
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
            step = step.owner(stop)
            low = max(start, step.cut)
            found.append((step.own_start + low - step.cut, step.own_start + stop - step.cut))
            stop = low
        return found[::-1]

    def tokens(self) -> Int32s:
        """The step's whole prompt and response."""
        return np.concatenate([self.steps.token_ids_N[slice(*each)] for each in self.segments(0, self.length)])


class StepTree:
    """The steps of one trajectory."""

    def __init__(self) -> None:
        self._steps: dict[int, StepNode] = {}

    def add(self, steps: Steps, k: int) -> StepNode:
        """Add step `k` of a table.

        Raises:
            PrefixError: the extended step was not added before, or has other tokens.
        """
        index, start, stop = int(steps.index_K[k]), int(steps.offsets_K[k]), int(steps.offsets_K[k + 1])
        parent, cut, before = None, 0, xxhash.xxh3_64()
        if (extends := extension_of(steps, k)) is not None:
            if (extended := self._steps.get(extends.step)) is None:
                raise PrefixError(f"{name_of(steps, k)} extends step {extends.step}, which is not there")
            if (cut := extends.length) <= extended.length:
                parent = extended.owner(cut)
                before = parent.digest(cut)
            if parent is None or before.intdigest() != extends.digest:
                raise PrefixError(f"{name_of(steps, k)} extends other tokens than step {extends.step} has")
        node = self._steps[index] = StepNode(steps, index, start, cut, cut + stop - start, parent, {cut: before})
        return node


def check_references(steps: Iterable[tuple[Steps, int]]) -> None:
    """Raise a PrefixError unless each step's reference is to tokens that exist and have the reference's digest.
    `steps`: the steps of one trajectory in order, each as (table, position in the table)."""
    tree = StepTree()
    for table, k in steps:
        tree.add(table, k)


def common(a: StepNode | None, length_a: int, b: StepNode | None, length_b: int) -> int:
    """Number of leading tokens that belong to the same steps in two paths, which end at these lengths in `a` and `b`;
    None is the path of no tokens."""
    while a is not b:
        if b is None or (a is not None and a.index > b.index):
            length_a, a = (0, None) if a is None else (a.cut, a.parent)
        else:
            length_b, b = b.cut, b.parent
    return min(length_a, length_b) if a is not None else 0
