"""An advantage reaches exactly the tokens of its own trajectory, by each row's own mask."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.learn.device_batch import expand_to_tokens, row_of_token


def spread(advantage_G: list[float], trajectory_R: list[int], lengths_R: list[int], mask_N: list[bool]) -> list[float]:
    cu_seqlens = torch.tensor(np.cumsum([0, *lengths_R]))
    rows_N = row_of_token(cu_seqlens, sum(lengths_R))
    mask = torch.tensor(mask_N, dtype=torch.bool)
    value_N = expand_to_tokens(torch.tensor(advantage_G), torch.tensor(trajectory_R), rows_N, mask)
    return [float(value) for value in value_N]


def test_every_row_of_a_trajectory_takes_its_advantage_by_its_own_mask() -> None:
    mask = [False, False, True, False, True, False, True, True]
    assert spread([0.5, -1.0], [0, 0, 1], [3, 2, 3], mask) == [0, 0, 0.5, 0, 0.5, 0, -1.0, -1.0]


def test_a_dummy_row_takes_nothing_even_from_an_advantage_that_is_not_a_number() -> None:
    assert spread([float("nan")], [-1], [2], [True, True]) == [0, 0]


@given(st.data())
def test_the_broadcast_is_the_loop_over_rows(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    n_tokens = sum(lengths)
    mask = data.draw(st.lists(st.booleans(), min_size=n_tokens, max_size=n_tokens))
    trajectories = data.draw(st.lists(st.integers(-1, 3), min_size=len(lengths), max_size=len(lengths)))
    advantage = [1.5, -0.25, 4.0, -8.0]
    expected, at = [], 0
    for length, trajectory in zip(lengths, trajectories, strict=True):
        for _ in range(length):
            expected.append(advantage[trajectory] if mask[at] and trajectory >= 0 else 0.0)
            at += 1
    assert spread(advantage, trajectories, lengths, mask) == expected
