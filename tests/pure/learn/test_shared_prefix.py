"""Shared prefixes are computed once, and nothing else changes: loss, metrics and gradients are those of packed rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from service.handoff.batches.pack import prefix_order
from service.learn import layouts
from service.learn.device_batch import DeviceBatch, DeviceSettings
from service.learn.learner import Learner
from service.learn.losses.step_metrics import step_metrics
from service.learn.model.policy import Policy
from service.learn.settings import LearnSettings
from service.types import MicroBatch, MiniBatch
from tests.pure.learn.builders import CPU, mini_batch, settings
from tests.pure.learn.ranks import Ranks
from tests.pure.learn.test_split import WAYS
from tests.pure.learn.trees import tree_rows
from tests.pure.learn.varlen import eager_graphs

TRAJECTORIES = 5
SHARED, PACKED = "shared_prefix", "packed"
FORMS = ["token_mean", "gspo, proximal", "sequence TIS", "masks", "kl k3"]


@pytest.fixture(autouse=True)
def exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    exact(monkeypatch)


def configured(way: str, layout: str, dtype: str, **trainer: Any) -> LearnSettings:
    return settings({"entropy_coef": 0.01} | WAYS[way], {"layout": layout} | trainer, dtype=dtype)


def tree_batch(seed: int) -> MiniBatch:
    rows = tree_rows(seed, TRAJECTORIES)
    half = len(rows) // 2
    return mini_batch([[rows[:half], rows[half:]]], TRAJECTORIES)


def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is worth sharing, and norms compute in the model's type.

    Those of the library round to float32, in a float64 model too, which would hide differences below 1e-7.
    """

    def forward(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
        variance = hidden.square().mean(-1, keepdim=True)
        return norm.weight * hidden * torch.rsqrt(variance + norm.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)
    monkeypatch.setattr(layouts, "prefix_order", partial(prefix_order, least=1, fraction=0))


def moved(
    config: LearnSettings, folder: Path, rank: int = 0, world_size: int = 1, policy: Policy | None = None
) -> Learner:
    """A learner whose policy is no longer its frozen weights."""
    learner = Learner(config, folder, CPU, rank, world_size, policy)
    learner.accumulate(tree_batch(0))
    learner.policy.master_weights.drop_gradients()
    for number, master in enumerate(learner.policy.master_weights.tensors.values()):
        master.mul_(1.02 if number % 2 else 0.97)
    learner.steps += 1
    return learner


def outcome(learner: Learner, batch: MiniBatch) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics and gradient of a mini-batch."""
    totals = learner.accumulate(batch).totals() | {"grad_square": 0.0}
    gradients = [p.grad for p in learner.policy.model.parameters() if p.grad is not None]
    gradient = torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in gradients])
    learner.policy.master_weights.drop_gradients()
    metrics = step_metrics(totals, int(batch.loss_tokens_G.sum()))
    # the variance itself is what is computed: a root of rounding errors would be larger than they are
    return {name: value**2 if name.endswith("_std") else value for name, value in metrics.items()}, gradient.double()


def assert_same(ours: Learner, expected: Learner, batch: MiniBatch, tolerance: float) -> None:
    (metrics, gradient), (other_metrics, other_gradient) = outcome(ours, batch), outcome(expected, batch)
    assert metrics == pytest.approx(other_metrics, rel=tolerance, abs=tolerance)
    assert float((gradient - other_gradient).norm()) <= tolerance * float(other_gradient.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])
@pytest.mark.parametrize("way", FORMS)
def test_random_trees_have_the_loss_metrics_and_gradients_of_packed_rows(
    model_folder: Path, way: str, dtype: str, tolerance: float
) -> None:
    ours, expected = (moved(configured(way, layout, dtype), model_folder) for layout in (SHARED, PACKED))
    first = 40 * FORMS.index(way)
    for seed in range(first, first + 40):
        assert_same(ours, expected, tree_batch(seed), tolerance)


def of_gpu(micro: MicroBatch, said: DeviceSettings, original: Any = DeviceBatch.of) -> DeviceBatch:
    """A micro-batch for the variable-length kernel, which `varlen_on_cpu` stands in for."""
    return original(micro, said._replace(variable_length=True))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize(
    ("kernel", "checkpointing", "compiled"),
    [
        ("padded lines", True, False),
        ("variable length", False, False),
        ("variable length", True, True),
        pytest.param("padded lines", True, True, marks=pytest.mark.full),
    ],
)
def test_so_they_have_with_every_kernel_compiled_and_with_checkpointing(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, checkpointing: bool, compiled: bool
) -> None:
    if kernel == "variable length":
        monkeypatch.setattr(DeviceBatch, "of", staticmethod(of_gpu))
    eager_graphs(monkeypatch)
    torch._dynamo.reset()
    trainer = {"gradient_checkpointing": checkpointing}
    ours = moved(configured("gspo", SHARED, "float64", **trainer, compile=compiled), model_folder)
    expected = moved(configured("gspo", PACKED, "float64"), model_folder)
    for seed in range(2 if compiled else 8):
        assert_same(ours, expected, tree_batch(seed), 1e-9)


def outcome_of_rank(rank: int, world_size: int, folder: Path, batch: MiniBatch) -> tuple[float, list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "prefix_order", partial(prefix_order, least=1, fraction=0))
        learner = Learner(configured("kl k3", SHARED, "float64"), folder, CPU, rank, world_size)
        report = learner.step(batch)
        assert report.applied
        return report.metrics["policy/grad_norm"], [report.metrics["policy/policy_loss"]]


def test_ranks_of_which_only_some_have_rows_that_share_keep_in_step(model_folder: Path, ranks: Ranks) -> None:
    rows = tree_rows(3, TRAJECTORIES)
    shares = [row for row in rows if row.trajectory < 3]
    alone = [row for row in rows if row.trajectory == 3][:1]
    batch = mini_batch([[shares, []], [alone, alone[:0]]], TRAJECTORIES)
    one_rank = mini_batch([[shares, alone]], TRAJECTORIES)
    learner = Learner(configured("kl k3", PACKED, "float64"), model_folder, CPU, 0, 1)
    expected = learner.step(one_rank).metrics
    for norm, losses in ranks(2, outcome_of_rank, model_folder, batch):
        assert norm == pytest.approx(expected["policy/grad_norm"], rel=1e-6)
        assert losses == pytest.approx([expected["policy/policy_loss"]], rel=1e-6)
