"""The order in which prompts are issued: each epoch has its own order, which is the same after a restart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from service.types import Int64s


class Prompts:
    """The dataset rows in the order in which their prompts are issued. After the last row a new epoch begins; with
    `shuffle`, each epoch has an order of its own.

    With 3 rows, places 0 1 2 are the first epoch, 3 4 5 the second. A group_id never repeats; it is equal to the
    group's place, unless a curriculum skipped places.
    """

    def __init__(self, uids: Sequence[str], seed: int, shuffle: bool) -> None:
        if not uids:
            raise ValueError("no prompts")
        self._uids, self._seed, self._shuffle = tuple(uids), seed, shuffle
        self._orders: dict[int, Int64s] = {}

    def __len__(self) -> int:
        return len(self._uids)

    def row(self, place: int) -> int:
        """The dataset row at a place in the order of issue."""
        return int(self.rows(place, place + 1)[0])

    def rows(self, start: int, stop: int) -> Int64s:
        """The dataset rows at the places from `start` to `stop`, or only to the end of the epoch that contains
        `start`."""
        epoch, first = divmod(start, len(self._uids))
        last = min(first + stop - start, len(self._uids))
        return self._order(epoch)[first:last] if self._shuffle else np.arange(first, last)

    def draw(self, place: int) -> float:
        """A pseudo-random number in [0, 1) that depends only on the seed and the place."""
        return xxhash.xxh3_64_intdigest(f"{self._seed}/{place}".encode()) / 2**64

    def uid(self, row: int) -> str:
        """The uid of the prompt in a dataset row."""
        return self._uids[row]

    def _order(self, epoch: int) -> Int64s:
        """The epoch's order of rows; the orders of the newest two epochs are cached."""
        if epoch not in self._orders:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self._uids))
            self._orders = {e: kept for e, kept in self._orders.items() if e == epoch - 1} | {epoch: order}
        return self._orders[epoch]
