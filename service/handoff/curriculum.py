"""Which prompt is issued next: prompts that are too easy or too hard so far are passed over.

Places of the dataset's order are gone through one by one. With `band: [0.1, 0.9]` and `outside: 0.25`:

    place            0     1     2     3     4
    success so far   -     1.0   0.5   0.0   0.0
    issued           yes   no    yes   no    yes     a quarter of the epochs issues each prompt outside of the band

The success of a prompt is a part of the ledger, and the row of every issued group is in the journal, so a run that is
resumed continues as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from service.handoff.ledger.ledger import Ledger
from service.handoff.ledger.state import Success
from service.types import Int64s

KINDS = ("untried", "below", "inside", "above")
"""Where the success of a prompt may lie."""
IN_EVERY_EPOCH = np.array([kind in ("untried", "inside") for kind in KINDS])
STRETCH = 8192
"""Places that are looked at together, because there may be many prompts and few in the band."""


class Prompts:
    """Rows in the order of issue; the dataset wraps, and every epoch has its own seeded order.

    With 3 rows, places 0 1 2 are the first epoch, 3 4 5 the second. A group_id never repeats; it is the group's place,
    unless a curriculum passed over places.
    """

    def __init__(self, uids: Sequence[str], seed: int, shuffle: bool) -> None:
        if not uids:
            raise ValueError("no prompts")
        self._uids = tuple(uids)
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, Int64s] = {}

    def __len__(self) -> int:
        return len(self._uids)

    def row(self, place: int) -> int:
        """The dataset row at a place in the order of issue."""
        epoch, place = divmod(place, len(self._uids))
        return int(self._order(epoch)[place]) if self._shuffle else place

    def rows(self, start: int, stop: int) -> Int64s:
        """The rows at places from `start` on, up to `stop` or the end of the epoch of `start`."""
        epoch, first = divmod(start, len(self._uids))
        last = min(first + stop - start, len(self._uids))
        return self._order(epoch)[first:last] if self._shuffle else np.arange(first, last)

    def draw(self, place: int) -> float:
        """A number in [0, 1) that depends on the seed and the place only."""
        return xxhash.xxh3_64_intdigest(f"{self._seed}/{place}".encode()) / 2**64

    def uid(self, row: int) -> str:
        """The row's uid."""
        return self._uids[row]

    def _order(self, epoch: int) -> Int64s:
        """The epoch's order of rows; the newest two are kept."""
        if epoch not in self._orders:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self._uids))
            self._orders = {e: kept for e, kept in self._orders.items() if e == epoch - 1} | {epoch: order}
        return self._orders[epoch]


class CurriculumSettings(NamedTuple):
    """Which prompts are passed over."""

    band: tuple[float, float]
    """Success between which, inclusive, a prompt is issued in every epoch."""
    outside: float
    """Fraction of the epochs in which a prompt outside of the band is issued."""
    min_groups: int
    """Groups of a prompt after which its success counts."""


class Curriculum:
    """The order of issue; without settings every place is issued."""

    def __init__(self, settings: CurriculumSettings | None, prompts: Prompts, ledger: Ledger) -> None:
        self._settings = settings
        self._prompts = prompts
        self._ledger = ledger
        self._kind_P = np.zeros(len(prompts), np.int8)
        """By row the index of its prompt's kind."""

    def next_place(self) -> int:
        """The next place to issue: the first one in the band, or whose turn it is outside; if there is none, the next.

        So where no prompt of the dataset lies in the band, all are issued.
        """
        start = first = self._ledger.state.next_place
        if self._settings is None:
            return first
        self._catch_up()
        while start < first + len(self._prompts):
            kind_P = self._kind_P[self._prompts.rows(start, min(start + STRETCH, first + len(self._prompts)))]
            end = start + len(kind_P)
            inside = np.flatnonzero(IN_EVERY_EPOCH[kind_P])
            if (place := self._first_drawn(start, start + int(inside[0]) if len(inside) else end)) < end:
                return place
            start = end
        return first

    def _first_drawn(self, start: int, stop: int) -> int:
        """The first of these places outside of the band whose turn it is; `stop` if there is none."""
        fraction = self._settings.outside if self._settings is not None else 0.0
        drawn = (place for place in range(start, stop) if self._prompts.draw(place) < fraction)
        return next(drawn, stop) if fraction else stop

    def counts(self) -> dict[str, int]:
        """Prompts by where their success so far lies; empty without settings."""
        if self._settings is None:
            return {}
        self._catch_up()
        return dict(zip(KINDS, np.bincount(self._kind_P, minlength=len(KINDS)).tolist(), strict=True))

    def _catch_up(self) -> None:
        """Look again at the prompts whose success has changed."""
        for row in self._ledger.tried:
            self._kind_P[row] = KINDS.index(self._kind(self._ledger.state.successes[row]))
        self._ledger.tried.clear()

    def _kind(self, tried: Success) -> str:
        if self._settings is None or tried.groups < self._settings.min_groups:
            return "untried"
        low, high = self._settings.band
        return "below" if tried.success < low else "above" if tried.success > high else "inside"
