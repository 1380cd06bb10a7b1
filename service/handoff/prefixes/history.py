"""The tokens of one trajectory's steps, each of which may carry only what an earlier one lacks.

    step 0  prompt [10 20 30]                 response [40 50]
    step 1  extends step 0 by 5 tokens, prompt [60 70], response [80 90]
    step 2  extends step 1 by 6 tokens, prompt [71],    response [81]       [10 20 30 40 50] [60] [71 81]

A step knows the step that holds the last token it extends, and the running digest up to there. So taking one in costs
what its own tokens cost, wherever it branches off; whole tokens are put together only for those who ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import xxhash

from service.handoff.prefixes.digest import token_bytes
from service.types import Int32s, Steps, TrajectoryId


class PrefixError(ValueError):
    """A step names tokens that are not there, or not those."""


class Piece(NamedTuple):
    """Tokens `start:stop` of a table's token axis."""

    start: int
    stop: int


class _Known:
    """One step: tokens of the trajectory from `cut` on; those before it are a piece of `parent`, and so on."""

    __slots__ = ("cut", "digests", "parent", "start", "total")

    def __init__(self, parent: _Known | None, cut: int, start: int, total: int, before: xxhash.xxh3_64) -> None:
        self.parent = parent
        self.cut = cut
        self.start = start
        """Where its own tokens begin in the table."""
        self.total = total
        self.digests = {cut: before}
        """Running digests by length, as far as somebody asked; they are copied before they go on."""

    def holding(self, length: int) -> _Known:
        """The step whose own tokens the `length` first tokens end with."""
        step = self
        while length <= step.cut and step.parent is not None:
            step = step.parent
        return step


class History:
    """The steps of one trajectory; each may be taken in when the one that it extends has been."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._bytes = token_bytes(steps.token_ids_N)
        self._known: dict[int, _Known] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._known

    def add(self, k: int) -> None:
        """Take in item `k` of the table.

        Raises:
            PrefixError: the step that it extends is not here, or has other tokens.
        """
        steps = self._steps
        index, start, stop = int(steps.index_K[k]), int(steps.offsets_K[k]), int(steps.offsets_K[k + 1])
        parent, cut = int(steps.extends_K[k]), int(steps.extends_length_K[k])
        if parent < 0:
            self._known[index] = _Known(None, 0, start, stop - start, xxhash.xxh3_64())
            return
        if parent not in self._known:
            raise PrefixError(f"{name_of(steps, k)} extends step {parent}, which is not there")
        extended = self._known[parent]
        if cut <= extended.total:
            holder = extended.holding(cut)
            before = self._digest(holder, cut)
            if before.intdigest() == int(steps.extends_digest_K[k]):
                self._known[index] = _Known(holder, cut, start, cut + stop - start, before)
                return
        raise PrefixError(f"{name_of(steps, k)} extends other tokens than step {parent} has")

    def total(self, index: int) -> int:
        """How many tokens a step's whole prompt and response have."""
        return self._known[index].total

    def pieces(self, index: int, start: int, stop: int) -> list[Piece]:
        """Where the tokens `start:stop` of a step's whole prompt and response lie in the table."""
        step, found = self._known[index], list[Piece]()
        while start < stop:
            step = step.holding(stop)
            low = max(start, step.cut)
            found.append(Piece(step.start + low - step.cut, step.start + stop - step.cut))
            stop = low
        return found[::-1]

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> Int32s:
        """The tokens `start:stop` of a step's whole prompt and response."""
        pieces = self.pieces(index, start, self.total(index) if stop is None else stop)
        ids_N = self._steps.token_ids_N
        return np.concatenate([ids_N[:0], *(ids_N[piece.start : piece.stop] for piece in pieces)])

    def whole(self, index: int) -> Int32s | None:
        """A step's whole prompt and response; None when it is not here."""
        return self.tokens(index) if index in self else None

    def _digest(self, step: _Known, length: int) -> xxhash.xxh3_64:
        """The running digest of the first tokens up to `length`, which end in the step's own."""
        if length not in step.digests:
            running = step.digests[step.cut].copy()
            running.update(self._bytes[4 * step.start : 4 * (step.start + length - step.cut)])
            step.digests[length] = running
        return step.digests[length]


def known_history(steps: Steps, items: Iterable[int]) -> History:
    """The steps of a trajectory, by index, as far as what they extend is there."""
    history = History(steps)
    for k in items:
        with suppress(PrefixError):  # what it extends may arrive later, or be refused when the trajectory is complete
            history.add(k)
    return history


def name_of(steps: Steps, k: int) -> str:
    """How item `k` of a table is called in messages."""
    trajectory = TrajectoryId(int(steps.group_id_K[k]), int(steps.sample_K[k]), int(steps.attempt_K[k]))
    return f"{trajectory}/step={steps.index_K[k]}"
