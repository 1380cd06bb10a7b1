"""The order in which prompts are issued; a curriculum skips prompts that have been too easy or too hard so far.

A place is a position in the order. Places are visited one by one. With `band: [0.1, 0.9]` and `outside: 0.25`:

    place            0     1     2     3     4
    success so far   -     1.0   0.5   0.0   0.0
    issued           yes   no    yes   no    yes     prompts outside the band are issued in a quarter of the epochs

All of this is in the journal, so a resumed run issues the same prompts as a run without an interruption.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from service.handoff.ledger.ledger import Ledger
from service.types import Int64s


class Prompts:
    """The dataset rows in the order in which their prompts are issued, epoch by epoch: with 3 rows, places 0 1 2 are
    the first epoch, 3 4 5 the second. With `shuffle`, each epoch has an order of its own."""

    def __init__(self, uids: Sequence[str], seed: int, shuffle: bool) -> None:
        if not uids:
            raise ValueError("no prompts")
        self._seed, self._shuffle = seed, shuffle
        self.uids = tuple(uids)
        """The uids of the prompts, by dataset row."""
        self._orders: dict[int, Int64s] = {}

    def row(self, place: int) -> int:
        """The dataset row at a place in the order of issue."""
        return int(self.rows(place, place + 1)[0])

    def rows(self, start: int, stop: int) -> Int64s:
        """The dataset rows at the places from `start` to `stop`, or to the end of the epoch."""
        epoch, first = divmod(start, len(self.uids))
        last = min(first + stop - start, len(self.uids))
        return self._order(epoch)[first:last] if self._shuffle else np.arange(first, last)

    def draw(self, place: int) -> float:
        """A pseudo-random number in [0, 1) that depends only on the seed and the place."""
        return xxhash.xxh3_64_intdigest(f"{self._seed}/{place}".encode()) / 2**64

    def _order(self, epoch: int) -> Int64s:
        """The epoch's order of rows; the orders of the newest two epochs are cached."""
        if epoch not in self._orders:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self.uids))
            self._orders = {e: kept for e, kept in self._orders.items() if e == epoch - 1} | {epoch: order}
        return self._orders[epoch]


KINDS = ("untried", "below", "inside", "above")
"""The kinds of prompts: without a complete group, or with a success below, in or above the band."""
IN_EVERY_EPOCH = np.array([kind in ("untried", "inside") for kind in KINDS])
STRETCH = 8192
"""Number of places that one array operation examines: it may take many places to find a prompt inside the band."""


class CurriculumSettings(NamedTuple):
    """Settings that decide which prompts are skipped."""

    band: tuple[float, float]
    """Lowest and highest success (fraction of trajectories) with which a prompt is issued in every epoch."""
    outside: float
    """Fraction of the epochs in which a prompt outside the band is issued."""


class Curriculum:
    """Chooses the prompts to issue, in their order; without settings, every prompt is issued in every epoch."""

    def __init__(self, settings: CurriculumSettings | None, prompts: Prompts, ledger: Ledger) -> None:
        self.prompts, self._settings, self._ledger = prompts, settings, ledger
        self._kind_P = np.zeros(len(prompts.uids), np.int8)
        """For each row, the index of its prompt's kind in `KINDS`."""

    def next_place(self) -> int:
        """The next place whose prompt is untried, inside the band, or drawn for this epoch. If one length of the
        dataset has no such place: the next place."""
        start = first = self._ledger.state.next_place
        if self._settings is None:
            return first
        self._catch_up(self._settings)
        while start < first + len(self.prompts.uids):
            kind_P = self._kind_P[self.prompts.rows(start, min(start + STRETCH, first + len(self.prompts.uids)))]
            end = start + len(kind_P)
            inside = np.flatnonzero(IN_EVERY_EPOCH[kind_P])
            stop = start + int(inside[0]) if len(inside) else end
            outside = range(start, stop) if self._settings.outside else ()
            drawn = (place for place in outside if self.prompts.draw(place) < self._settings.outside)
            if (place := next(drawn, stop)) < end:
                return place
            start = end
        return first

    def counts(self) -> dict[str, int]:
        """The number of prompts by kind; empty without settings."""
        if self._settings is None:
            return {}
        self._catch_up(self._settings)
        return dict(zip(KINDS, np.bincount(self._kind_P, minlength=len(KINDS)).tolist(), strict=True))

    def _catch_up(self, settings: CurriculumSettings) -> None:
        low, high = settings.band
        for row in self._ledger.tried:
            tried = self._ledger.state.successes[row]
            kind = "below" if tried.success < low else "above" if tried.success > high else "inside"
            self._kind_P[row] = KINDS.index(kind)
        self._ledger.tried.clear()
