"""Weights and masks for what another policy sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from service.config.learn import CorrectionConfig
from service.learn.losses.correction import Correction, correct, over_trajectory, trajectory_ratios

RATIO_M = np.array([0.5, 1.0, 3.0, 1.0, 1.2, 0.1])
TRAJECTORY_M = torch.tensor([0, 0, 0, 1, 1, 2])


def corrected(**settings: Any) -> Correction:
    log_ratio = torch.from_numpy(np.log(RATIO_M))
    halves = (slice(0, 2), slice(2, 6))  # two micro-batches; trajectory 0 has rows in both
    ratios = trajectory_ratios([log_ratio[h] for h in halves], [TRAJECTORY_M[h] for h in halves], 4)
    return correct(CorrectionConfig(**settings), log_ratio, ratios, TRAJECTORY_M)


def test_without_settings_nothing_is_corrected() -> None:
    nothing = corrected()
    assert nothing.weight_M.tolist() == [1.0] * 6
    assert nothing.kept_M.all() and not nothing.truncated_M.any()
    assert not over_trajectory(CorrectionConfig())


def test_token_ratios_are_truncated_above_only() -> None:
    fix = corrected(truncate="token", truncate_at=2.0)
    assert fix.weight_M.tolist() == pytest.approx([0.5, 1.0, 2.0, 1.0, 1.2, 0.1])
    assert fix.truncated_M.tolist() == [False, False, True, False, False, False]


def test_sequence_ratios_are_products_over_all_rows_of_a_trajectory() -> None:
    fix = corrected(truncate="sequence", truncate_at=1.3)
    assert fix.weight_M.tolist() == pytest.approx([1.3, 1.3, 1.3, 1.2, 1.2, 0.1])
    assert fix.truncated_M.tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("band", "kept"),
    [
        ({"token_band": (0.5, 2.0)}, [True, True, False, True, True, False]),
        ({"token_band": (0.0, 2.0)}, [True, True, False, True, True, True]),
        ({"sequence_band": (0.5, 1.4)}, [False, False, False, True, True, False]),
        ({"geometric_band": (0.5, 1.1)}, [False, False, False, True, True, False]),
        ({"geometric_band": (0.5, 1.2)}, [True, True, True, True, True, False]),
        ({"outlier_band": (0.2, 2.0)}, [False, False, False, True, True, False]),
        ({"outlier_band": (0.05, 4.0)}, [True] * 6),
        ({"token_band": (0.5, 2.0), "outlier_band": (0.2, 4.0)}, [True, True, False, True, True, False]),
    ],
)
def test_bands_mask_tokens_or_whole_trajectories(band: dict[str, Any], kept: list[bool]) -> None:
    assert corrected(**band).kept_M.tolist() == kept


def test_a_trajectory_without_loss_tokens_has_ratios_of_one() -> None:
    ratios = trajectory_ratios([torch.tensor([0.5])], [torch.tensor([1])], 3)
    for value_G in ratios:
        assert torch.equal(value_G, torch.tensor([0.0, 0.5, 0.0]))
    empty = trajectory_ratios([torch.zeros(0)], [torch.zeros(0, dtype=torch.int64)], 2)
    assert torch.equal(empty.sum_G, torch.zeros(2))


def test_a_ratio_that_is_not_a_number_is_masked_by_any_band() -> None:
    fix = correct(CorrectionConfig(token_band=(0.1, 10.0)), torch.tensor([float("nan")]), None, torch.tensor([0]))
    assert fix.kept_M.tolist() == [False]
