"""Supervised steps before RL: what they learn, how they are packed, and their learning rate."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from service.config.tree import WarmStartConfig
from service.errors import RunFailed
from service.learn.learner import Learner
from service.learn.model.optimizer import MasterWeights, Optimizer
from service.learn.model.policy import Policy
from service.learn.supervised import SupervisedSteps
from service.types import SupervisedRow
from tests.pure.learn.builders import CPU, made_rows, settings


def test_losses_and_steps_are_those_of_transformers_and_adam(model_folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="eager")
    vectors = [weight for weight in reference.parameters() if weight.ndim == 1]  # norms do not decay
    groups = [[weight for weight in reference.parameters() if weight.ndim > 1], vectors]
    decays = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)]
    adam = torch.optim.AdamW(decays, lr=1e-3, betas=(0.9, 0.95))
    trainer = {"max_tokens_per_micro_batch": 40, "betas": (0.9, 0.95), "weight_decay": 0.1}
    config = settings(trainer=trainer, dtype="float64")
    supervised = SupervisedSteps(config, Policy(config, model_folder, CPU, 0, 1))
    rows = [SupervisedRow(row.token_ids, row.loss_mask) for row in made_rows(6, seed=12)]

    def expected() -> Tensor:
        """The mean over all learned tokens, each row alone."""
        losses = []
        for token_ids, mask in rows:
            ids = torch.as_tensor(token_ids, dtype=torch.int64)
            logits = reference(ids[None]).logits[0, :-1]
            losses.append(cross_entropy(logits, ids[1:], reduction="none")[torch.as_tensor(mask[1:])])
        return torch.cat(losses).mean()

    for _ in range(3):
        loss = expected()
        assert supervised.loss(rows) == pytest.approx(loss.item(), abs=1e-7)
        assert supervised.step(rows, lr=1e-3) == pytest.approx(loss.item(), abs=1e-7)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), config.trainer.max_grad_norm)
        adam.step()
        adam.zero_grad()


def test_a_supervised_loss_that_is_not_finite_ends_the_run(model_folder: Path) -> None:
    learner = Learner(settings(), model_folder, CPU, 0, 1)
    learner.policy.master_weights.tensors["model.norm.weight"].fill_(float("nan"))
    with pytest.raises(RunFailed, match=r"lower model\.warm_start\.lr"):
        rows = [SupervisedRow(row.token_ids, row.loss_mask) for row in made_rows(2, seed=13)]
        SupervisedSteps(settings(), learner.policy).step(rows, lr=1e-3)


def test_the_warm_start_draws_demonstrations_and_its_learning_rate_rises_and_falls(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(warm_start=WarmStartConfig(steps=20, batch_size=3, lr=2.0))
    supervised = SupervisedSteps(config, Policy(config, model_folder, CPU, 0, 1))
    rates, drawn = [], []

    def step(rows: Sequence[SupervisedRow], lr: float) -> float:
        rates.append(lr)
        drawn.append([len(token_ids) for token_ids, _ in rows])
        return float(len(rates))

    monkeypatch.setattr(supervised, "step", step)
    demonstrations = [SupervisedRow(np.zeros(length, np.int32), np.ones(length, bool)) for length in range(1, 8)]
    assert supervised.warm_start(demonstrations) == 20.0
    assert rates == pytest.approx([1.0, *(2.0 * (1 - step / 20) for step in range(1, 20))])
    assert all(len(set(lengths)) == 3 for lengths in drawn), "a demonstration comes at most once a step"
    assert len({tuple(lengths) for lengths in drawn}) > 1


def test_weight_decay_spares_the_biases_of_experts_too() -> None:
    model = nn.Module()
    model.experts, model.experts_bias = nn.Parameter(torch.ones(2, 3, 3)), nn.Parameter(torch.ones(2, 3))
    optimizer = Optimizer(MasterWeights(model, torch.float32, False, False), (0.9, 0.95), weight_decay=0.1)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step(lr=0.5, grad_norm=0.0, max_grad_norm=1.0)
    assert torch.all(model.experts == 0.95) and torch.all(model.experts_bias == 1.0)
