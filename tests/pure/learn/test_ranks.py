"""The processes in which tests run the ranks of a process group."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.pure.learn.ranks import Ranks


def leave_at_once(rank: int, world_size: int) -> int:
    return rank


def fail_first(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ArithmeticError("rank 0 fails")
    dist.barrier()


def test_ranks_that_leave_their_group_at_once_let_the_others_finish_joining_it(ranks: Ranks) -> None:
    for _ in range(30):
        assert ranks(3, leave_at_once) == [0, 1, 2]


def test_ranks_that_wait_for_one_that_failed_are_not_in_the_way_of_the_next_call(ranks: Ranks) -> None:
    with pytest.raises(ArithmeticError, match="rank 0 fails"):
        ranks(3, fail_first)
    assert ranks(3, leave_at_once) == [0, 1, 2]
