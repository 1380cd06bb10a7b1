"""The teacher's term: its gradient is that of the reverse KL divergence, however trajectories are cut into rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from service.config.learn import AlgorithmConfig, TeacherConfig
from service.handoff.batches.batch import BatchSettings, batch_of_rank, form_mini_batch
from service.handoff.ledger.scores import CompleteGroup, sampled_tokens
from service.handoff.ledger.state import VersionHistory
from service.handoff.prefixes.merge import Mode
from service.handoff.prefixes.sharing import shared_form
from service.handoff.steps import wire
from service.handoff.steps.tables import ends_table, steps_table
from service.learn.device_batch import DeviceBatch
from service.learn.learner import Learner
from service.learn.losses.objective import teacher_advantage, teacher_loss
from service.learn.losses.policy_losses import LossInputs, ppo_clip
from service.types import MiniBatch, Step, TrajectoryEnd
from tests.pure.learn.builders import settings
from tests.pure.learn.test_credit_split import cut_at_random, gradient, group_of, in_float64

SETTINGS = {"estimator": "rloo", "reduction": "trajectory_mean", "clip_low": 0.9, "clip_high": 10.0}
MODES = ["advantage", "kl"]


class Micro:
    """What the term reads of a micro-batch."""

    def __init__(self, rollout_M: Tensor, teacher_M: Tensor | None) -> None:
        self.rollout_logprob_M, self.teacher_logprob_M = rollout_M, teacher_M


@pytest.mark.parametrize("mode", MODES)
def test_the_expected_gradient_is_that_of_the_reverse_kl_divergence(mode: str) -> None:
    """Enumerated over all tokens of a vocabulary of six, in float64."""
    torch.manual_seed(1)
    logits, teacher = torch.randn(6, dtype=torch.float64, requires_grad=True), torch.randn(6).double().log_softmax(0)
    policy = logits.log_softmax(0)
    divergence = (policy.exp() * (policy - teacher)).sum()
    (expected,) = torch.autograd.grad(0.7 * divergence, logits)
    teaching = TeacherConfig(coef=0.7, mode=mode)
    sampled = logits.log_softmax(0)
    micro: Any = Micro(sampled.detach(), teacher)
    inputs = LossInputs(sampled, sampled.detach(), teacher_advantage(teaching, micro), None)
    terms = ppo_clip(inputs, AlgorithmConfig()).loss_M + teacher_loss(teaching, "k2", sampled, micro)
    (found,) = torch.autograd.grad((sampled.detach().exp() * terms).sum(), logits)
    assert (found - expected).abs().max() < 1e-12


def test_tokens_without_a_teacher_get_nothing_and_no_gradient_that_is_nan() -> None:
    logprob = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    micro: Any = Micro(logprob.detach(), torch.tensor([float("nan"), -1.0], dtype=torch.float64))
    loss = teacher_loss(TeacherConfig(mode="kl"), "k3", logprob, micro)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert logprob.grad is not None and loss[0] == 0 and logprob.grad[0] == 0 and logprob.grad[1] != 0
    assert teacher_advantage(TeacherConfig(coef=2.0), micro).tolist() == [0.0, 2.0]
    assert teacher_advantage(TeacherConfig(), Micro(logprob.detach(), None)).tolist() == [0.0, 0.0]  # type: ignore[arg-type]


# -- through the learner -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=MODES)
def learner(model_folder: Path, request: pytest.FixtureRequest) -> Iterator[Learner]:
    yield in_float64(settings(SETTINGS | {"teacher": {"coef": 0.5, "mode": request.param}}), model_folder)


def taught_batch(
    steps: list[Step], ends: list[TrajectoryEnd], mode: Mode, budget: int, shift: float = 0.0
) -> MiniBatch:
    """The mini-batch of one group; the second of its trajectories has no teacher."""
    table = steps_table(shared_form(steps))
    teacher_N = np.full(len(table.token_ids_N), np.nan, np.float32)
    sampled = sampled_tokens(table)
    values = -3 - np.cos(np.arange(len(sampled))) + shift
    teacher_N[sampled] = values
    item_N = np.searchsorted(table.offsets_K, np.arange(len(teacher_N)), "right") - 1
    teacher_N[table.sample_K[item_N] == 1] = np.nan
    group = CompleteGroup(0, "p", replace(table, teacher_logprobs_N=teacher_N), ends_table(ends))
    batch = form_mini_batch(0, [group], VersionHistory(), BatchSettings(1, budget, "rloo", "sum", mode=mode))
    micros = tuple(replace(micro, temperature_R=np.ones_like(micro.temperature_R)) for micro in batch.ranks[0])
    return wire.decode_mini_batch(wire.encode_mini_batch(batch_of_rank(replace(batch, ranks=(micros,)), 0)))


@pytest.mark.parametrize("cuttings", [8, pytest.param(200, marks=pytest.mark.full)])
def test_any_cutting_into_rows_leaves_the_gradient_as_it_is(learner: Learner, cuttings: int) -> None:
    rng = np.random.default_rng(4)
    steps, ends = group_of(rng)
    expected = gradient(learner, taught_batch(steps, ends, "off", 1000))
    modes: list[Mode] = ["off", "linear", "tree"]
    for number in range(cuttings):
        batch = taught_batch(cut_at_random(rng, steps), ends, modes[number % 3], int(rng.integers(20, 80)))
        assert np.linalg.norm(gradient(learner, batch) - expected) <= 1e-9 * np.linalg.norm(expected)
    other = gradient(learner, taught_batch(steps, ends, "off", 1000, shift=0.5))
    assert np.linalg.norm(other - expected) > 1e-2 * np.linalg.norm(expected)


def test_the_gradient_is_that_of_the_definition(learner: Learner) -> None:
    """Autograd of the formula, written down once more for whole trajectories."""
    steps, ends = group_of(np.random.default_rng(4))
    batch = taught_batch(steps, ends, "tree", 1000)
    found = gradient(learner, batch)
    teaching = learner._objective._algorithm.teacher
    assert teaching is not None
    loss = torch.zeros((), dtype=torch.float64)
    for host in batch.ranks[0]:
        micro: DeviceBatch = learner.policy.to_device(host)
        logprob_M = learner.policy.model(micro).logprob_M
        assert micro.teacher_logprob_M is not None
        known_M = ~micro.teacher_logprob_M.isnan()
        teacher_M = torch.where(known_M, micro.teacher_logprob_M, 0)
        advantage_M = torch.tensor(batch.advantage_G.tolist(), dtype=torch.float64)[micro.trajectory_M]
        kl_M = torch.zeros_like(logprob_M)
        if teaching.mode == "advantage":
            advantage_M = advantage_M + torch.where(known_M, teaching.coef * (teacher_M - micro.rollout_logprob_M), 0)
        else:
            ratio_M = teacher_M - logprob_M
            kl_M = torch.where(known_M, teaching.coef * (ratio_M.exp() - 1 - ratio_M), 0)
        ratio_M = (logprob_M - micro.rollout_logprob_M).exp()
        clipped_M = ratio_M.clamp(1 - 0.9, 1 + 10.0)
        policy_M = -torch.minimum(ratio_M * advantage_M, clipped_M * advantage_M)
        tokens_G = torch.tensor(batch.loss_tokens_G.tolist(), dtype=torch.float64)
        loss = loss + ((policy_M + kl_M) / (tokens_G * len(tokens_G))[micro.trajectory_M]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    parts = [p.grad.flatten() for p in learner.policy.model.parameters() if p.grad is not None]
    expected = torch.cat(parts).double().numpy()
    learner.policy.master_weights.drop_gradients()
    assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)


def test_the_metrics_say_how_far_the_policy_is_from_its_teacher(learner: Learner) -> None:
    steps, ends = group_of(np.random.default_rng(4))
    batch = taught_batch(steps, ends, "tree", 1000)
    report = learner.step(batch)
    assert report.applied and 0 < report.metrics["policy/teacher_token_ratio"] < 1
    [micro] = batch.ranks[0]
    assert micro.teacher_logprobs_N is not None
    known_N = micro.loss_mask_N & ~np.isnan(micro.teacher_logprobs_N)
    expected = (micro.logprobs_N - micro.teacher_logprobs_N)[known_N].mean()
    assert report.metrics["policy/teacher_kl"] == pytest.approx(float(expected), rel=1e-5)
