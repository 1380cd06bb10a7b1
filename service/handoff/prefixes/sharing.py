"""References of steps: each prompt is sent as the longest prefix that an earlier step has; references are checked.

    whole prompt    step 1: prompt [10 20 30 40 50 60 70]                        response [80 90]
    as it is sent   step 1: prompt (first 5 tokens of step 0) [60 70]            response [80 90]

The reference carries the digest of the tokens [10 20 30 40 50]; messages, journal and memory hold only this form.

The steps of one trajectory are a tree of references (`StepTree`), which says which step carries each token:

    step 0  prompt [10 20 30]                              response [40 50]
    step 1  prompt (first 5 tokens of step 0) [60 70]      response [80 90]
    step 2  prompt (first 6 tokens of step 1) [71]         response [81]

    tokens of step 2       [10 20 30 40 50] of step 0, [60] of step 1, [71 81] of its own

The time to add a step is proportional to its own tokens, wherever it branches off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from service.columns import digest, token_bytes
from service.handoff.steps.tables import extension_of, name_of
from service.types import Extension, Int32s, Step, Steps, TrajectoryId


def longest_prefix(prompt_ids: Int32s, earlier: Iterable[tuple[int, Int32s]]) -> Extension | None:
    """A reference to the earlier step that shares the longest prefix with a prompt; None if no step shares a token.

    `earlier`: (index, whole prompt and response) of each earlier step, newest first; the newest of equals is chosen.

    >>> earlier = [(1, np.array([1, 2, 3, 4], np.int32)), (0, np.array([1, 9], np.int32))]
    >>> longest_prefix(np.array([1, 2, 7], np.int32), earlier)[:2]
    (1, 2)
    """
    step, length = -1, 0
    for index, token_ids in earlier:
        if len(token_ids) > length and (shared := common_prefix(token_ids, prompt_ids)) > length:
            step, length = index, shared
    return Extension(step, length, digest(prompt_ids[:length])) if length else None


def shared_form(steps: Sequence[Step]) -> list[Step]:
    """The steps, in any order, as they are sent: whole prompts are replaced by a reference and the tokens after it."""
    wholes: dict[TrajectoryId, dict[int, Int32s]] = {}
    made = list(steps)
    for place in sorted(range(len(made)), key=lambda place: made[place].index):
        step, prompt_ids = made[place], made[place].prompt_ids
        whole = wholes.setdefault(step.trajectory, {})
        if step.extends is not None:
            before = whole.get(step.extends.step, prompt_ids[:0])[: step.extends.length]
            prompt_ids = np.concatenate((before, prompt_ids))
        elif extends := longest_prefix(prompt_ids, ((i, whole[i]) for i in reversed(whole) if i < step.index)):
            routed = None if step.routed_experts is None else step.routed_experts[extends.length :]
            own_ids = prompt_ids[extends.length :]
            made[place] = replace(step, prompt_ids=own_ids, extends=extends, routed_experts=routed)
        whole[step.index] = np.concatenate((prompt_ids, step.response_ids))
    return made


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


class PrefixError(ValueError):
    """Raised if a step's reference is to tokens that do not exist, or to other tokens."""


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
        """The segments of the token axis in which the tokens `start:stop` of prompt and response lie, in one table."""
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
        """Add step `k` of a table; PrefixError if the step that it extends is missing or has another digest."""
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
    """Raise a PrefixError for a wrong reference. `steps`: of one trajectory, in order, as (table, position there)."""
    tree = StepTree()
    for table, k in steps:
        tree.add(table, k)
