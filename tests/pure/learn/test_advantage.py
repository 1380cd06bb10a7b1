"""REINFORCE++ along the tokens of whole trajectories, on the device."""

import numpy as np
import pytest
import torch

from service.learn.device_batch import DeviceBatch, DeviceSettings
from service.learn.losses.token_advantages import token_advantages, whitening
from tests.pure.learn.builders import CPU, made_rows, mini_batch, split_row


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_returns_are_discounted_from_the_last_token_and_whitened_over_the_mini_batch(gamma: float) -> None:
    rows = made_rows(5, seed=40)
    batch = mini_batch([[rows[:2], rows[2:]]], trajectories=5)
    batch.return_G[:] = [1.0, 0.0, 0.5, -1.0, 1.0]
    expected = [
        batch.return_G[row.trajectory] * gamma ** np.arange(row.loss_mask.sum())[::-1].astype(float) for row in rows
    ]
    every = np.concatenate(expected)
    white = (every - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8)

    how = whitening(batch, gamma)
    returns_G = torch.from_numpy(batch.return_G)
    ours = [
        token_advantages(returns_G, how, DeviceBatch.of(micro, DeviceSettings(CPU, torch.float64)))
        for micro in batch.ranks[0]
    ]
    assert torch.cat(ours).numpy() == pytest.approx(white)


def test_a_trajectory_in_several_rows_has_no_token_axis_to_discount_along() -> None:
    rows = [part for row in made_rows(2, seed=41) for part in split_row(row, [4])]
    with pytest.raises(ValueError, match="one row"):
        whitening(mini_batch([[rows]], trajectories=2), 1.0)
