"""The same loss and gradient however trajectories are cut into rows, packed or sharded."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from service.config.tree import Config, ModelConfig
from service.learn.learner import Learner
from service.types import MiniBatch
from tests.pure.learn.builders import CPU, MadeRow, made_rows, mini_batch, settings, split_row
from tests.pure.learn.ranks import Ranks

TRAJECTORIES = 6
REDUCTIONS = ["token_mean", "trajectory_mean", "prompt_mean", "seq_mean_token_sum_norm"]


class Outcome(NamedTuple):
    """A mini-batch's loss and gradient."""

    loss: float
    size: float
    """Sum of the absolute token terms over the denominator: the scale that rounding is relative to."""
    gradient: np.ndarray


def configured(reduction: str, dtype: str) -> Config:
    config = settings({"reduction": reduction, "entropy_coef": 0.01})
    # float64 is no setting of a run; it tells rounding from error
    return config.model_copy(update={"model": ModelConfig.model_construct(dtype=dtype)})


def outcome(config: Config, folder: Path, batch: MiniBatch, rank: int = 0, world: int = 1) -> Outcome:
    learner = Learner(config, folder, CPU, rank, world)
    totals = learner.accumulate(batch).totals()
    gradients = [parameter.grad for parameter in learner.model.parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return Outcome(totals["loss"], totals["loss_size"], torch.cat([g.flatten() for g in whole]).double().numpy())


def outcomes_of_rank(
    rank: int, world: int, folder: Path, ways: dict[str, tuple[str, str, MiniBatch]]
) -> dict[str, Outcome]:
    return {
        name: outcome(configured(reduction, dtype), folder, batch, rank, world)
        for name, (reduction, dtype, batch) in ways.items()
    }


def reference() -> list[MadeRow]:
    return made_rows(TRAJECTORIES, seed=20)


def cut(rows: list[MadeRow]) -> list[MadeRow]:
    """Every second trajectory as two or three rows, the rows in another order."""
    parts = [
        part for row in rows for part in split_row(row, [[], [len(row.token_ids) // 2], [3, 5]][row.trajectory % 3])
    ]
    return [parts[i] for i in np.random.default_rng(0).permutation(len(parts))]


def batch_in(world: int, rows: list[MadeRow]) -> MiniBatch:
    """All rows of a trajectory on one rank, two micro-batches each; the second may be empty."""
    ranks = [[row for row in rows if row.trajectory % world == rank] for rank in range(world)]
    return mini_batch([[mine[: len(mine) // 2], mine[len(mine) // 2 :]] for mine in ranks], TRAJECTORIES)


def assert_same(ours: Outcome, expected: Outcome, dtype: str) -> None:
    tolerance = 1e-5 if dtype == "float64" else 1e-4
    assert abs(ours.loss - expected.loss) <= 1e-5 * expected.size
    difference = np.linalg.norm(ours.gradient - expected.gradient)
    assert difference <= tolerance * np.linalg.norm(expected.gradient)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cutting_and_packing_leave_loss_and_gradient_as_they_are(
    model_folder: Path, reduction: str, dtype: str
) -> None:
    rows = reference()
    expected = outcome(configured(reduction, "float64"), model_folder, mini_batch([[rows]], TRAJECTORIES))
    ways = {
        "a micro-batch a row": mini_batch([[[row] for row in rows]], TRAJECTORIES),
        "cut": mini_batch([[cut(rows)]], TRAJECTORIES),
        "cut and packed": batch_in(1, cut(rows)),
        "reversed, with a dummy": mini_batch([[rows[::-1], []]], TRAJECTORIES),
    }
    for batch in ways.values():
        assert_same(outcome(configured(reduction, dtype), model_folder, batch), expected, dtype)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_leave_loss_and_gradient_as_they_are(model_folder: Path, ranks: Ranks, world: int) -> None:
    rows = reference()
    ways = {
        f"{reduction}, {dtype}, {kind}": (reduction, dtype, batch_in(world, these))
        for reduction in REDUCTIONS
        for dtype in ("float32", "float64")
        for kind, these in (("whole", rows), ("cut", cut(rows)))
    }
    by_rank = ranks(world, outcomes_of_rank, model_folder, ways)
    for name, (reduction, dtype, _) in ways.items():
        expected = outcome(configured(reduction, "float64"), model_folder, mini_batch([[rows]], TRAJECTORIES))
        for results in by_rank:
            assert_same(results[name], expected, dtype)


def test_a_rank_without_rows_keeps_in_step(model_folder: Path, ranks: Ranks) -> None:
    rows = reference()
    way = {"lonely": ("token_mean", "float64", mini_batch([[rows], [[]]], TRAJECTORIES))}
    expected = outcome(configured("token_mean", "float64"), model_folder, mini_batch([[rows]], TRAJECTORIES))
    for results in ranks(2, outcomes_of_rank, model_folder, way):
        assert_same(results["lonely"], expected, "float64")


def test_the_mean_over_rows_is_not_split_invariant(model_folder: Path) -> None:
    """Hence the configuration refuses it with step-wise rows, unless merging is off on purpose."""
    rows = reference()
    whole, parts = (
        outcome(configured("sequence_mean", "float64"), model_folder, mini_batch([[these]], TRAJECTORIES))
        for these in (rows, cut(rows))
    )
    assert abs(whole.loss - parts.loss) > 1e-3 * whole.size
