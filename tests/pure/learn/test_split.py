"""The same loss and gradient however trajectories are cut into rows, packed or sharded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from service.handoff.batches.pack import prefix_order
from service.learn import layouts
from service.learn.learner import Learner
from service.learn.settings import LearnSettings
from service.types import MiniBatch
from tests.pure.learn.builders import CPU, MadeRow, made_rows, mini_batch, settings, split_row
from tests.pure.learn.ranks import Ranks

TRAJECTORIES = 6

WAYS: dict[str, dict[str, Any]] = {
    "token_mean": {"reduction": "token_mean"},
    "trajectory_mean": {"reduction": "trajectory_mean"},
    "prompt_mean": {"reduction": "prompt_mean"},
    "seq_mean_token_sum_norm": {"reduction": "seq_mean_token_sum_norm", "norm_tokens": 30},
    "kl k1": {"reduction": "trajectory_mean", "kl_coef": 0.5, "kl_estimator": "k1"},
    "kl k2": {"reduction": "prompt_mean", "kl_coef": 5.0, "kl_estimator": "k2"},
    "kl k3": {"kl_coef": 5.0, "reference": {"on_cpu": True}},
    "gspo": {"loss": "gspo", "reduction": "trajectory_mean", "clip_low": 0.05, "clip_high": 0.05},
    "gspo, proximal": {"loss": "gspo", "anchor": "proximal", "anchor_every": 4, "clip_high": 0.01},
    "sequence TIS": {
        "anchor": "proximal",
        "anchor_every": 4,
        "clip_low": 0.02,
        "correction": {"truncate": "sequence", "truncate_at": 1.05},
    },
    "sequence TIS, fresh anchor": {
        "anchor": "proximal",
        "correction": {"truncate": "sequence", "truncate_at": 3.0, "sequence_band": (1e-3, 10.0)},
    },
    "token TIS": {
        "loss": "dual_clip",
        "anchor": "proximal",
        "anchor_every": 2,
        "correction": {"truncate": "token", "truncate_at": 1.1, "token_band": (0.7, 1.6)},
    },
    "masks": {"loss": "cispo", "correction": {"geometric_band": (0.6, 1.1), "outlier_band": (0.2, 5.0)}},
}


class Outcome(NamedTuple):
    """A mini-batch's loss and gradient."""

    loss: float
    size: float
    """Sum of the absolute token terms over the denominator: the scale that rounding is relative to."""
    gradient: np.ndarray


def configured(way: str, dtype: str) -> LearnSettings:
    return settings({"entropy_coef": 0.01} | WAYS[way], dtype=dtype)


def outcome(config: LearnSettings, folder: Path, batch: MiniBatch, rank: int = 0, world_size: int = 1) -> Outcome:
    learner = Learner(config, folder, CPU, rank, world_size)
    # frozen weights are taken at the first mini-batch; then the policy moves on
    learner.accumulate(batch)
    learner.policy.master_weights.drop_gradients()
    for number, master in enumerate(learner.policy.master_weights.tensors.values()):
        master.mul_(1.02 if number % 2 else 0.97)
    learner.steps += 1

    totals = learner.accumulate(batch).totals()
    gradients = [parameter.grad for parameter in learner.policy.model.parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return Outcome(totals["loss"], totals["loss_size"], torch.cat([g.flatten() for g in whole]).double().numpy())


def outcomes_of_rank(
    rank: int, world_size: int, folder: Path, cases: dict[str, tuple[str, str, MiniBatch]]
) -> dict[str, Outcome]:
    return {
        name: outcome(configured(way, dtype), folder, batch, rank, world_size)
        for name, (way, dtype, batch) in cases.items()
    }


def reference() -> list[MadeRow]:
    return made_rows(TRAJECTORIES, seed=20)


def cut(rows: list[MadeRow]) -> list[MadeRow]:
    """Every second trajectory as two or three rows, the rows in another order."""
    parts = [
        part for row in rows for part in split_row(row, [[], [len(row.token_ids) // 2], [3, 5]][row.trajectory % 3])
    ]
    return [parts[i] for i in np.random.default_rng(0).permutation(len(parts))]


def batch_in(world_size: int, rows: list[MadeRow]) -> MiniBatch:
    """All rows of a trajectory on one rank, two micro-batches each; the second may be empty."""
    ranks = [[row for row in rows if row.trajectory % world_size == rank] for rank in range(world_size)]
    return mini_batch([[mine[: len(mine) // 2], mine[len(mine) // 2 :]] for mine in ranks], TRAJECTORIES)


@pytest.mark.parametrize("layout", ["packed", "padded", "shared_prefix"])
def test_every_layout_has_the_same_loss_and_gradient(
    model_folder: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "prefix_order", partial(prefix_order, least=1, fraction=0))
    rows = reference()
    expected = outcome(configured("kl k2", "float64"), model_folder, mini_batch([[rows]], TRAJECTORIES))
    config = configured("kl k2", "float64")
    config = replace(config, trainer=config.trainer.model_copy(update={"layout": layout}))
    assert_same(outcome(config, model_folder, batch_in(1, cut(rows))), expected, "float64")


def assert_same(ours: Outcome, expected: Outcome, dtype: str) -> None:
    tolerance = 1e-5 if dtype == "float64" else 1e-4
    assert abs(ours.loss - expected.loss) <= 1e-5 * expected.size
    difference = np.linalg.norm(ours.gradient - expected.gradient)
    assert difference <= tolerance * np.linalg.norm(expected.gradient)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("way", WAYS)
def test_cutting_and_packing_leave_loss_and_gradient_as_they_are(model_folder: Path, way: str, dtype: str) -> None:
    rows = reference()
    expected = outcome(configured(way, "float64"), model_folder, mini_batch([[rows]], TRAJECTORIES))
    batches = {
        "a micro-batch a row": mini_batch([[[row] for row in rows]], TRAJECTORIES),
        "cut": mini_batch([[cut(rows)]], TRAJECTORIES),
        "cut and packed": batch_in(1, cut(rows)),
        "reversed, with a dummy": mini_batch([[rows[::-1], []]], TRAJECTORIES),
    }
    for batch in batches.values():
        assert_same(outcome(configured(way, dtype), model_folder, batch), expected, dtype)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_leave_loss_and_gradient_as_they_are(model_folder: Path, ranks: Ranks, world_size: int) -> None:
    rows = reference()
    cases = {
        f"{way}, {dtype}": (way, dtype, batch_in(world_size, cut(rows)))
        for way in WAYS
        for dtype in ("float32", "float64")
    }
    by_rank = ranks(world_size, outcomes_of_rank, model_folder, cases)
    for way in WAYS:
        expected = outcome(configured(way, "float64"), model_folder, mini_batch([[rows]], TRAJECTORIES))
        for dtype in ("float32", "float64"):
            for results in by_rank:
                assert_same(results[f"{way}, {dtype}"], expected, dtype)


@pytest.mark.parametrize("way", ["gspo", "sequence TIS", "masks", "kl k2"])
def test_the_settings_under_test_change_the_gradient(model_folder: Path, way: str) -> None:
    """Otherwise the tests above would prove nothing about them."""
    batch = mini_batch([[reference()]], TRAJECTORIES)
    gradient = outcome(configured(way, "float64"), model_folder, batch).gradient
    plain = outcome(configured("trajectory_mean", "float64"), model_folder, batch).gradient
    assert np.linalg.norm(gradient - plain) > 1e-2 * np.linalg.norm(plain)


def test_a_rank_without_rows_keeps_in_step(model_folder: Path, ranks: Ranks) -> None:
    rows = reference()
    way = {"lonely": ("token_mean", "float64", mini_batch([[rows], [[]]], TRAJECTORIES))}
    expected = outcome(configured("token_mean", "float64"), model_folder, mini_batch([[rows]], TRAJECTORIES))
    for results in ranks(2, outcomes_of_rank, model_folder, way):
        assert_same(results["lonely"], expected, "float64")
