"""Each loss and each reduction as published, where a trajectory is one row; and what is masked contributes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service.config.checks import LOSSES
from service.config.learn import AlgorithmConfig
from service.errors import ConfigError
from service.learn.device_batch import DeviceBatch, DeviceSettings
from service.learn.learner import Learner
from service.learn.losses.objective import FixedLogprobs, Objective
from service.learn.losses.policy_losses import (
    _LOSSES,
    LossInputs,
    LossTerms,
    PolicyLoss,
    check_terms,
    kl_term,
    loss_named,
)
from service.learn.losses.step_metrics import Sums
from service.learn.model.logprob import TokenLogprobs
from service.types import MiniBatch
from tests.pure.learn.builders import CPU, MadeRow, made_rows, mini_batch, settings

Padded = np.ndarray
"""[G, T]"""


def own_logprobs(rows: list[MadeRow]) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [row.logprobs + rng.normal(0, 0.5, len(row.logprobs)) for row in rows]


def ours(rows: list[MadeRow], batch: MiniBatch, algorithm: dict[str, Any]) -> tuple[float, np.ndarray]:
    """Loss and its derivative by each loss token's log-probability."""
    objective = Objective(settings(algorithm), CPU, torch.float64)
    micro = DeviceBatch.of(batch.ranks[0][0], DeviceSettings(CPU, torch.float64))
    own = torch.from_numpy(np.concatenate(own_logprobs(rows)))[micro.loss_token_M].requires_grad_()
    fixed = FixedLogprobs(current_M=own.detach())
    prepared = objective.prepare(batch, [micro], [fixed])
    loss = objective.loss(micro, fixed, prepared, TokenLogprobs(own, torch.zeros_like(own)), Sums(CPU, 1))
    loss.backward()
    assert own.grad is not None
    return float(loss.detach()), own.grad.numpy()


def padded(values: list[np.ndarray]) -> Padded:
    width = max(len(value) for value in values)
    return np.stack([np.pad(value.astype(float), (0, width - len(value))) for value in values])


def surrogate(ratio: Padded, advantage: Padded) -> Padded:
    return -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)


def gspo(ratio: Padded, advantage: Padded, mask: Padded, **_: Any) -> Padded:
    mean = (np.log(ratio) * mask).sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1)
    return surrogate(np.exp(mean) * np.ones_like(ratio), advantage)


def dual(ratio: Padded, advantage: Padded, **_: Any) -> Padded:
    plain = surrogate(ratio, advantage)
    return np.where(advantage < 0, np.minimum(-3.0 * advantage, plain), plain)


PUBLISHED: dict[str, Callable[..., Padded]] = {
    "ppo_clip": lambda ratio, advantage, **_: surrogate(ratio, advantage),
    "dual_clip": dual,
    "cispo": lambda ratio, advantage, logprob, **_: -advantage * np.clip(ratio, 0.8, 1.28) * logprob,
    "rollout_is": lambda ratio, advantage, logprob, **_: (
        -np.where((ratio > 0.8) & (ratio < 1.28), ratio, 0) * advantage * logprob
    ),
    "importance_sampling": lambda ratio, advantage, **_: -ratio * advantage,
    "gspo": gspo,
    "cross_entropy": lambda ratio, advantage, logprob, **_: -logprob,
}


def reduce(term: Padded, mask: Padded, reduction: str, prompt_of: np.ndarray) -> float:
    tokens = mask.sum(1)
    sums = (term * mask).sum(1)
    match reduction:
        case "token_mean":
            return float(sums.sum() / tokens.sum())
        case "trajectory_mean":
            return float((sums / np.maximum(tokens, 1)).mean())
        case "seq_mean_token_sum_norm":
            return float((sums / (1024 + 256)).mean())
        case _:
            prompts = [sums[prompt_of == p].sum() / max(tokens[prompt_of == p].sum(), 1) for p in range(2)]
            return float(np.mean(prompts))


REDUCTIONS = ["token_mean", "trajectory_mean", "prompt_mean", "seq_mean_token_sum_norm"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_loss_is_the_published_one(name: str, reduction: str) -> None:
    rows = made_rows(6, seed=30)
    rows[1].loss_mask[:] = False  # a fully masked trajectory still counts in a mean over trajectories
    batch = mini_batch([[rows]], trajectories=6)
    loss, _ = ours(rows, batch, {"loss": name, "reduction": reduction})

    mask, rollout = padded([row.loss_mask for row in rows]), padded([row.logprobs for row in rows])
    logprob = padded(own_logprobs(rows))
    advantage = batch.advantage_G[:, None].astype(float) * np.ones_like(mask)
    term = PUBLISHED[name](ratio=np.exp(logprob - rollout), advantage=advantage, logprob=logprob, mask=mask)
    assert loss == pytest.approx(reduce(term, mask, reduction, batch.prompt_of_trajectory_G), rel=1e-9)


@pytest.mark.parametrize("name", ["cispo", "rollout_is", "importance_sampling", "ppo_clip"])
def test_losses_differ_in_what_gradient_they_leave_to_a_ratio_out_of_range(name: str) -> None:
    inputs = LossInputs(torch.tensor([-1.0, -1.0], requires_grad=True), torch.tensor([-1.0, -3.0]), torch.ones(2), None)
    loss_named(name).function(inputs, AlgorithmConfig()).loss_M.sum().backward()
    assert inputs.logprob_M.grad is not None
    inside, outside = inputs.logprob_M.grad.tolist()
    assert inside == pytest.approx(-1.0)
    expected = {"cispo": -1.28, "rollout_is": 0.0, "importance_sampling": -np.exp(2.0), "ppo_clip": 0.0}
    assert outside == pytest.approx(expected[name])


def test_gspo_has_the_gradient_of_the_trajectory_ratio() -> None:
    rows = made_rows(4, seed=31)
    batch = replace(mini_batch([[rows]], trajectories=4), advantage_G=np.array([1, 1, -1, -1], np.float32))
    algorithm = {"loss": "gspo", "reduction": "trajectory_mean", "clip_low": 0.99, "clip_high": 99.0}
    _, gradient = ours(rows, batch, algorithm)
    at = 0
    for row, own, advantage in zip(rows, own_logprobs(rows), (1, 1, -1, -1), strict=True):
        n = int(row.loss_mask.sum())
        ratio = np.exp((own - row.logprobs)[row.loss_mask].mean())
        assert gradient[at : at + n] == pytest.approx(np.full(n, -advantage * ratio / (n * 4)))
        at += n


def test_the_losses_that_may_stand_in_a_configuration_are_those_that_are_registered() -> None:
    assert set(LOSSES) == {
        name for name, loss in _LOSSES.items() if loss.function.__module__ == "service.learn.losses.policy_losses"
    }


@pytest.mark.parametrize(
    ("estimator", "published"),
    [("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: np.exp(-d) - 1 + d)],
)
def test_kl_estimators_are_the_published_ones(estimator: str, published: Callable[[np.ndarray], np.ndarray]) -> None:
    logprob, reference = np.array([-1.0, -2.0, -0.5]), np.array([-1.5, -1.0, -0.5])
    ours = kl_term(estimator, torch.from_numpy(logprob), torch.from_numpy(reference))
    assert ours.numpy() == pytest.approx(published(logprob - reference))


def test_a_ratio_far_out_stays_finite() -> None:
    inputs = LossInputs(torch.tensor([-1.0, -1e30]), torch.tensor([-1e30, -1.0]), torch.tensor([1.0, -1.0]), None)
    for name in ("ppo_clip", "dual_clip", "cispo", "rollout_is", "importance_sampling"):
        assert torch.isfinite(loss_named(name).function(inputs, AlgorithmConfig()).loss_M).all(), name


def test_a_loss_of_ones_own_trains(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text(
        "from service.learn.losses.policy_losses import LossTerms, policy_loss\n"
        "@policy_loss('twice')\n"
        "def twice(inputs, settings):\n"
        "    return LossTerms(-2 * inputs.advantage_M * inputs.logprob_M, inputs.advantage_M > 1e9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    learner = Learner(settings({"loss": "my_losses:twice"}), model_folder, CPU, 0, 1)
    assert learner.step(mini_batch([[made_rows(4, seed=32)]], trajectories=4)).applied
    with pytest.raises(ValueError, match="exists already"):
        sys.modules.pop("my_losses")
        loss_named("my_losses:twice")


def test_a_loss_that_is_not_there_is_named_with_the_nearest(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'ppo_clip'"):
        Learner(settings({"loss": "ppo_clop"}), model_folder, CPU, 0, 1)
    with pytest.raises(ConfigError, match="'absent_module' cannot be imported"):
        loss_named("absent_module:mine")


def test_terms_of_a_loss_are_one_per_token() -> None:
    terms = loss_named("ppo_clip").function(LossInputs(*torch.zeros(3, 5), None), AlgorithmConfig())
    assert isinstance(terms, LossTerms)
    assert terms.loss_M.shape == terms.clipped_M.shape == (5,)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda t: LossTerms(t.logprob_M[:, None] * t.advantage_M, t.advantage_M > 0), r"loss_M .* 5 tokens.*\[5, 5\]"),
        (lambda t: LossTerms(t.logprob_M.sum(), t.advantage_M > 0), r"loss_M with one value for each of 5 tokens"),
        (lambda t: LossTerms(-t.logprob_M, torch.tensor(False)), r"clipped_M with one value"),
        (lambda t: -t.logprob_M, r"must return LossTerms\(loss_M, clipped_M\), not a Tensor"),
        (lambda t: LossTerms(-t.logprob_M.detach(), t.advantage_M > 0), "without a gradient"),
    ],
)
def test_a_loss_of_the_wrong_shape_is_named_and_never_broadcast(
    returned: Callable[[LossInputs], Any], said: str
) -> None:
    inputs = LossInputs(torch.zeros(5, requires_grad=True), torch.zeros(5), torch.ones(5), None)
    with pytest.raises(ConfigError, match=rf"algorithm\.loss: 'mine:loss' .*{said}"):
        check_terms("mine:loss", returned(inputs), inputs)


def test_the_learner_checks_what_a_loss_returns(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mean = PolicyLoss(lambda inputs, _: LossTerms(-inputs.logprob_M.mean(), inputs.advantage_M > 0), False)
    monkeypatch.setattr("service.learn.losses.objective.loss_named", lambda setting: mean)
    with pytest.raises(ConfigError, match=r"algorithm\.loss: 'ppo_clip' must return loss_M"):
        Learner(settings(), model_folder, CPU, 0, 1).step(mini_batch([[made_rows(4, seed=33)]], trajectories=4))
