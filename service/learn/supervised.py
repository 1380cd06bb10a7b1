"""Supervised rows as micro-batches, for the warm start before RL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.types import Bools, Int32s, MicroBatch

SupervisedRow = tuple[Int32s, Bools]
"""Token ids and the mask of those to learn, both [T]."""


def supervised_micro_batches(rows: Sequence[SupervisedRow], max_tokens: int) -> list[MicroBatch]:
    """Pack rows, in order, into micro-batches of at most `max_tokens`; a longer row gets one of its own."""
    packs: list[list[SupervisedRow]] = []
    room = 0
    for row in rows:
        if not packs or len(row[0]) > room:
            packs.append([])
            room = max_tokens
        packs[-1].append(row)
        room -= len(row[0])
    return [_micro_batch(pack) for pack in packs]


def empty_micro_batch() -> MicroBatch:
    """No rows at all; keeps a rank in step with others that have more."""
    return _micro_batch([])


def _micro_batch(rows: Sequence[SupervisedRow]) -> MicroBatch:
    lengths = [len(token_ids) for token_ids, _ in rows]
    n_tokens = sum(lengths)
    return MicroBatch(
        token_ids_N=np.concatenate([np.zeros(0, np.int32), *(token_ids for token_ids, _ in rows)]).astype(np.int32),
        offsets_R=np.cumsum([0, *lengths], dtype=np.int64),
        loss_mask_N=np.concatenate([np.zeros(0, bool), *(mask for _, mask in rows)]).astype(bool),
        logprobs_N=np.zeros(n_tokens, np.float32),
        staleness_N=np.full(n_tokens, -1, np.int32),
        temperature_R=np.ones(len(rows), np.float32),
        trajectory_of_row_R=np.full(len(rows), -1, np.int32),
    )
