"""Metrics and gradient of a mini-batch, exact enough that another order of the same work can be told from an error."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from service.handoff.batches.pack import prefix_order
from service.learn import device_batch
from service.learn.learner import Learner
from service.learn.losses.step_metrics import step_metrics
from service.learn.model.policy import Policy
from service.learn.settings import LearnSettings
from service.types import MiniBatch, PolicyVersion, Step, TrajectoryId
from tests.pure.handoff.worlds import step
from tests.pure.learn.builders import CPU, VOCABULARY, MadeRow, made_rows, mini_batch, settings, split_row

TRAJECTORIES = 6
SHARED, PACKED = "shared_prefix", "packed"

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

MERGED_WAYS = ["token_mean", "gspo", "sequence TIS", "kl k3", "trajectory_mean", "masks"]
"""Ways that count tokens, trajectories and groups differently: few enough for many batches."""


def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is worth sharing, and norms compute in the model's type.

    Those of the library round to float32, in a float64 model too, which would hide differences below 1e-7.
    """

    def forward(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
        variance = hidden.square().mean(-1, keepdim=True)
        return norm.weight * hidden * torch.rsqrt(variance + norm.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)
    monkeypatch.setattr(device_batch, "prefix_order", partial(prefix_order, least=1, fraction=0))


def configured(way: str, layout: str = PACKED, dtype: str = "float64", **trainer: Any) -> LearnSettings:
    return settings({"entropy_coef": 0.01} | WAYS[way], {"layout": layout} | trainer, dtype=dtype)


class Outcome(NamedTuple):
    """What a mini-batch leads to."""

    metrics: dict[str, float]
    gradient: np.ndarray


def moved(
    config: LearnSettings,
    folder: Path,
    batch: MiniBatch,
    rank: int = 0,
    world_size: int = 1,
    policy: Policy | None = None,
) -> Learner:
    """A learner whose policy is no longer its frozen weights, which it takes at the first mini-batch."""
    learner = Learner(config, folder, CPU, rank, world_size, policy)
    learner.accumulate(batch)
    learner.policy.master_weights.drop_gradients()
    for number, master in enumerate(learner.policy.master_weights.tensors.values()):
        master.mul_(1.02 if number % 2 else 0.97)
    learner.steps += 1
    return learner


def outcome(learner: Learner, batch: MiniBatch) -> Outcome:
    """Metrics and gradient of a mini-batch; no step is taken."""
    totals = learner.accumulate(batch).totals() | {"grad_square": 0.0}
    gradients = [p.grad for p in learner.policy.model.parameters() if p.grad is not None]
    gradient = torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in gradients])
    learner.policy.master_weights.drop_gradients()
    metrics = step_metrics(totals, int(batch.loss_tokens_G.sum()))
    # the variance itself is what is computed: a root of rounding errors would be larger than they are
    metrics = {name: value**2 if name.endswith("_std") else value for name, value in metrics.items()}
    return Outcome(metrics, gradient.double().numpy())


def assert_same(ours: Outcome, expected: Outcome, tolerance: float) -> None:
    assert ours.metrics == pytest.approx(expected.metrics, rel=tolerance, abs=tolerance)
    difference = np.linalg.norm(ours.gradient - expected.gradient)
    assert difference <= tolerance * np.linalg.norm(expected.gradient)


def reference() -> list[MadeRow]:
    return made_rows(TRAJECTORIES, seed=20)


def cut(rows: list[MadeRow]) -> list[MadeRow]:
    """Every second trajectory as two or three rows, the rows in another order."""
    cuts = {row.trajectory: [[], [len(row.token_ids) // 2], [3, 5]][row.trajectory % 3] for row in rows}
    parts = [part for row in rows for part in split_row(row, cuts[row.trajectory])]
    return [parts[i] for i in np.random.default_rng(0).permutation(len(parts))]


def batch_in(parts: int, rows: list[MadeRow], trajectories: int = TRAJECTORIES) -> MiniBatch:
    """All rows of a trajectory in one part, two micro-batches each; the last one is empty."""
    ranks = [[row for row in rows if row.trajectory % parts == part] for part in range(parts)]
    micros = [[mine[: len(mine) // 2], mine[len(mine) // 2 :]] for mine in ranks]
    micros[-1] = [ranks[-1], []]
    return mini_batch(micros, trajectories)


def played(rng: np.random.Generator, trajectory: TrajectoryId, turns: int) -> list[Step]:
    """Turns that mostly continue the one before; some drift by a token, some go aside and the next one comes back."""
    start = rng.integers(0, VOCABULARY, rng.integers(2, 6)).tolist()
    history, steps, aside = list(start), list[Step](), None
    for index in range(turns):
        response = rng.integers(0, VOCABULARY, rng.integers(1, 5)).astype(np.int32)
        mask = np.ones(len(response), bool)
        mask[-1] = len(response) == 1 or bool(rng.random() < 0.7)  # the last token may be an appended end
        made = step(index, history, response.tolist(), trajectory=trajectory, uid=str(trajectory.group_id))
        logprobs = np.where(mask, rng.normal(-3.6, 0.3, len(response)), 0).astype(np.float32)
        versions = np.where(mask, PolicyVersion(0, 0).pack(), -1).astype(np.int64)
        steps.append(replace(made, logprobs=logprobs, loss_mask=mask, versions=versions, reward=float(rng.normal())))
        kind = rng.random()
        if aside is not None:
            history, aside = aside, None
        elif kind < 0.3:
            aside = history + response.tolist() + [int(rng.integers(VOCABULARY))]
            history = start + rng.integers(0, VOCABULARY, 2).tolist()
        elif kind < 0.4 and len(history) > 2:
            history = [*history[:-1], (history[-1] + 1) % VOCABULARY, *response.tolist()]
        else:
            history = history + response.tolist() + rng.integers(0, VOCABULARY, rng.integers(0, 4)).tolist()
    return steps
