"""Every distinct token of rows is numbered once, and every row finds its own tokens again."""

import numpy as np
import pytest

from service.handoff.batches.pack import MIN_SHARED, prefix_order
from service.learn.device_batch import distinct_slots
from tests.pure.learn.trees import tree_rows


def packed(seed: int) -> tuple[list[tuple[int, ...]], np.ndarray, np.ndarray]:
    rows = [tuple(row.token_ids.tolist()) for row in tree_rows(seed)] + [()] * (seed % 2)
    token_ids = np.array([token for row in rows for token in row], np.int32)
    return rows, token_ids, np.cumsum([0, *map(len, rows)], dtype=np.int64)


def prefixes(rows: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {row[:length] for row in rows for length in range(1, len(row) + 1)}


@pytest.mark.parametrize("seed", range(100))
def test_two_tokens_are_one_exactly_if_their_rows_are_alike_up_to_them(seed: int) -> None:
    rows, token_ids, offsets = packed(seed)
    slot_N = distinct_slots(prefix_order(token_ids, offsets, least=1, fraction=0), offsets)
    slots = {}
    for row, start in zip(rows, offsets, strict=False):
        for place in range(len(row)):
            slot = int(slot_N[start + place])
            assert slots.setdefault(slot, row[: place + 1]) == row[: place + 1]
    assert slots.keys() == set(range(len(prefixes(rows))))


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_different_parts_share_nothing(seed: int) -> None:
    rows, token_ids, offsets = packed(seed)
    part = np.random.default_rng(seed).integers(0, 3, len(rows))
    order = prefix_order(token_ids, offsets, least=1, fraction=0).within(part)
    lengths = np.diff(offsets)[order.row_R]
    for number in range(3):
        mine = part[order.row_R] == number
        distinct = int((lengths - order.shared_R)[mine].sum())
        assert distinct == len(prefixes([row for row, p in zip(rows, part, strict=True) if p == number]))


def test_tokens_for_which_other_experts_were_recorded_are_not_shared() -> None:
    token_ids, offsets = np.tile(np.arange(40, dtype=np.int32), 3), np.array([0, 40, 80, 120])
    experts = np.zeros((120, 2, 2), np.int16)
    experts[40 + 30 :] = 1  # the second row from its 30th token on, and the whole third row
    order = prefix_order(token_ids, offsets, experts)
    assert sorted(order.shared_R.tolist()) == [0, 0, 30]
    assert prefix_order(token_ids, offsets).shared_R.tolist() == [0, 40, 40]


def test_a_few_tokens_in_common_are_not_worth_sharing() -> None:
    for shared, own, is_shared in (
        (MIN_SHARED - 1, 1, False),
        (MIN_SHARED, 1, True),
        (2 * MIN_SHARED, 18 * MIN_SHARED, True),
        (2 * MIN_SHARED, 19 * MIN_SHARED, False),
    ):
        rows = [[*range(shared), *range(100 + row, 100 + row + own)] for row in range(2)]
        offsets, expected = np.arange(3) * (shared + own), shared if is_shared else 0
        assert prefix_order(np.array(rows, np.int32).ravel(), offsets).shared_R.tolist() == [0, expected]
