"""What the trainer's settings change, and that the rest stays as it is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from service.config.learn import TrainerConfig
from service.errors import UserError
from service.learn.learner import Learner
from service.learn.model import logprob
from service.learn.model.policy import Policy
from service.learn.optimizer import learning_rate
from tests.pure.learn.builders import CPU, made_rows, mini_batch, settings
from tests.pure.learn.ranks import Ranks


@pytest.mark.parametrize(
    ("schedule", "halfway", "end"), [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)]
)
def test_schedules_fall_from_the_warm_up_to_the_share_at_the_end(schedule: str, halfway: float, end: float) -> None:
    trainer = TrainerConfig(lr=2.0, warmup_steps=10, schedule=schedule, min_lr_fraction=0.1)
    rates = [learning_rate(trainer, step, max_steps=110) for step in (0, 9, 10, 60, 110, 200)]
    assert rates == pytest.approx([0.2, 2.0, 2.0, 2.0 * halfway, 2.0 * end, 2.0 * end])


def losses(
    rank: int, world_size: int, folder: Path, trainer: dict[str, Any], dtype: str, sharded: bool = False
) -> list[float]:
    config = settings(trainer=trainer, dtype=dtype)
    policy = Policy(config, folder, CPU, rank, world_size, sharded=sharded)
    learner = Learner(config, folder, CPU, rank, world_size, policy)
    rows = made_rows(6, seed=80)
    batch = mini_batch([[[row for row in rows if row.trajectory % world_size == r]] for r in range(world_size)], 6)
    found = [learner.step(batch).metrics["policy/policy_loss"] for _ in range(3)]
    weights = learner.policy.weights()
    assert (weights is None) == (rank != 0)
    if weights is not None:
        assert {weight.dtype for weight in weights.values()} == {getattr(torch, dtype)}
    return found


@pytest.mark.parametrize(
    "trainer",
    [
        {"cpu_offload": True},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": 2},
        {"layout": "padded"},
    ],
)
def test_memory_savers_take_the_same_steps(model_folder: Path, trainer: dict[str, Any]) -> None:
    plain = losses(0, 1, model_folder, {}, "float32")
    assert losses(0, 1, model_folder, trainer, "float32") == pytest.approx(plain, abs=1e-6)


def test_ranks_take_the_same_steps_offloaded_or_not_and_in_bfloat16_nearly(model_folder: Path, ranks: Ranks) -> None:
    plain = losses(0, 1, model_folder, {}, "float32")
    for results in ranks(2, losses, model_folder, {"cpu_offload": True}, "float32"):
        assert results == pytest.approx(plain, abs=1e-5)
    sharded = ranks(2, losses, model_folder, {"gradient_checkpointing": True}, "bfloat16")
    assert sharded[0] == sharded[1] == pytest.approx(plain, abs=0.02)
    assert losses(0, 1, model_folder, {}, "bfloat16") == pytest.approx(plain, abs=0.02)


@pytest.mark.parametrize("trainer", [{}, {"cpu_offload": True}])
def test_one_rank_shards_on_request_and_takes_the_same_steps(
    model_folder: Path, ranks: Ranks, trainer: dict[str, Any]
) -> None:
    plain = losses(0, 1, model_folder, {}, "float64")
    assert ranks(1, losses, model_folder, trainer, "float64", True) == [pytest.approx(plain, abs=1e-9)]
    (in_bfloat16,) = ranks(1, is_sharded, model_folder, trainer)
    assert in_bfloat16 == [torch.float32] * 2


def is_sharded(rank: int, world_size: int, folder: Path, trainer: dict[str, Any]) -> list[torch.dtype]:
    policy = Policy(settings(trainer=trainer, dtype="bfloat16"), folder, CPU, rank, world_size, sharded=True)
    assert all(isinstance(parameter, DTensor) for parameter in policy.model.parameters())
    (master, *_), (parameter, *_) = policy.master_weights.tensors.values(), policy.master_weights.parameters.values()
    assert master.data_ptr() == parameter.to_local().data_ptr()
    return [master.dtype, parameter.dtype]


def test_fused_kernels_that_are_not_installed_are_named(model_folder: Path) -> None:
    with pytest.raises(UserError, match="liger-kernel cannot be imported"):
        Learner(settings(trainer={"fused_kernels": True}), model_folder, CPU, 0, 1)


def test_metrics_tell_staleness_apart(model_folder: Path) -> None:
    rows = made_rows(4, seed=81)
    for row, staleness in zip(rows, (0, 4, 4, 30), strict=True):
        row.staleness[:] = np.where(row.loss_mask, staleness, -1)
    metrics = Learner(settings(), model_folder, CPU, 0, 1).step(mini_batch([[rows]], trajectories=4)).metrics
    tokens = {name: value for name, value in metrics.items() if name.endswith("/tokens")}
    counts = [int(row.loss_mask.sum()) for row in rows]
    assert tokens == {
        "policy/by_staleness/0/tokens": counts[0],
        "policy/by_staleness/3_4/tokens": counts[1] + counts[2],
        "policy/by_staleness/9_up/tokens": counts[3],
    }
    means = [metrics[f"policy/by_staleness/{name}/is_ratio_mean"] for name in ("0", "3_4", "9_up")]
    weights = [counts[0], counts[1] + counts[2], counts[3]]
    assert np.average(means, weights=weights) == pytest.approx(metrics["policy/is_ratio_mean"])
    assert 0 < metrics["policy/effective_sample_fraction"] <= 1
    assert math.isfinite(metrics["policy/is_ratio_max"])


@pytest.mark.full
# What torch's compiler warns about on its own way, when it is imported and when it looks at tensors.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_and_fused_functions_compute_the_same(model_folder: Path) -> None:
    plain = losses(0, 1, model_folder, {}, "float32")
    assert losses(0, 1, model_folder, {"compile": True}, "float32") == pytest.approx(plain, abs=1e-5)
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    arguments = (logits, torch.arange(9), torch.linspace(0.5, 2.0, 9))
    statistics = logprob.statistics.__wrapped__
    for ours, expected in zip(torch.compile(statistics)(*arguments), statistics(*arguments), strict=True):
        torch.testing.assert_close(ours, expected)
