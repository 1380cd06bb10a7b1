"""Each loss, reduction and correction as published, where a trajectory is one row; what is masked counts nowhere."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from service.config.checks import LOSSES
from service.config.learn import AlgorithmConfig, CorrectionConfig, TeacherConfig
from service.errors import ConfigError
from service.learn.device_batch import DeviceBatch, DeviceSettings, expand_to_tokens, row_of_token
from service.learn.learner import Learner
from service.learn.losses.correction import Correction, correct, over_trajectory, trajectory_ratios
from service.learn.losses.objective import FixedLogprobs, Objective, teacher_advantage, teacher_loss
from service.learn.losses.policy_losses import (
    _LOSSES,
    LossInputs,
    LossTerms,
    PolicyLoss,
    check_terms,
    kl_term,
    loss_named,
)
from service.learn.losses.step_metrics import RatioMetrics, Sums, step_metrics
from service.learn.model.logprob import TokenLogprobs
from service.types import MiniBatch
from tests.pure.learn.builders import CPU, MadeRow, made_rows, mini_batch, settings

Padded = np.ndarray
"""[G, T]"""


def own_logprobs(rows: list[MadeRow]) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [row.logprobs + rng.normal(0, 0.5, len(row.logprobs)) for row in rows]


def ours(
    rows: list[MadeRow], batch: MiniBatch, algorithm: dict[str, Any]
) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, its derivative by each loss token's log-probability, and the sums for the metrics."""
    objective, sums = Objective(settings(algorithm), CPU, torch.float64), Sums(CPU, 1)
    micro = DeviceBatch.of(batch.ranks[0][0], DeviceSettings(CPU, torch.float64))
    own = torch.from_numpy(np.concatenate(own_logprobs(rows)))[micro.loss_token_M].requires_grad_()
    fixed = FixedLogprobs(current_M=own.detach())
    prepared = objective.prepare(batch, [micro], [fixed])
    loss = objective.loss(micro, fixed, prepared, TokenLogprobs(own, torch.zeros_like(own)), sums)
    loss.backward()
    assert own.grad is not None
    return float(loss.detach()), own.grad.numpy(), sums.totals()


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
    loss, *_ = ours(rows, batch, {"loss": name, "reduction": reduction})

    mask, rollout = padded([row.loss_mask for row in rows]), padded([row.logprobs for row in rows])
    logprob = padded(own_logprobs(rows))
    advantage = batch.advantage_G[:, None].astype(float) * np.ones_like(mask)
    term = PUBLISHED[name](ratio=np.exp(logprob - rollout), advantage=advantage, logprob=logprob, mask=mask)
    assert loss == pytest.approx(reduce(term, mask, reduction, batch.prompt_of_trajectory_G), rel=1e-9)


def test_tokens_outside_a_band_leave_the_loss_and_the_others_have_their_weights() -> None:
    rows = made_rows(6, seed=30)
    batch = mini_batch([[rows]], trajectories=6)
    fix = {"truncate": "token", "truncate_at": 1.1, "token_band": (0.7, 1.6)}
    loss, _, sums = ours(rows, batch, {"loss": "importance_sampling", "correction": fix})

    mask, rollout = padded([row.loss_mask for row in rows]), padded([row.logprobs for row in rows])
    ratio = np.exp(padded(own_logprobs(rows)) - rollout)
    kept = (ratio >= 0.7) & (ratio <= 1.6)
    term = np.where(kept, -np.minimum(ratio, 1.1) * ratio * batch.advantage_G[:, None], 0)
    assert loss == pytest.approx(reduce(term, mask, "token_mean", batch.prompt_of_trajectory_G), rel=1e-9)
    assert sums["masked"] == (mask * ~kept).sum() > 0 and sums["truncated"] == (mask * (ratio > 1.1)).sum() > 0


def test_the_terms_beside_the_policy_and_the_metrics_of_ratios_are_their_formulas() -> None:
    rows, rng = made_rows(6, seed=30), np.random.default_rng(4)
    batch = mini_batch([[rows]], trajectories=6)
    algorithm = {"loss": "importance_sampling", "anchor": "proximal", "kl_coef": 0.3, "kl_estimator": "k2"}
    algorithm |= {"entropy_coef": 0.1, "correction": {"truncate": "sequence", "truncate_at": 1.2}}
    objective, sums = Objective(settings(algorithm), CPU, torch.float64), Sums(CPU, 1)
    micro = DeviceBatch.of(batch.ranks[0][0], DeviceSettings(CPU, torch.float64))
    rollout_M, owner_M = micro.rollout_logprob_M.numpy(), micro.trajectory_M.numpy()
    own_M, frozen_M, reference_M = (rollout_M + rng.normal(0, 0.2, len(rollout_M)) for _ in range(3))
    entropy_M = rng.random(len(own_M))
    own, frozen, reference, entropy = map(torch.from_numpy, (own_M, frozen_M, reference_M, entropy_M))
    fixed = FixedLogprobs(own, frozen, reference)
    prepared = objective.prepare(batch, [micro], [fixed])
    loss = objective.loss(micro, fixed, prepared, TokenLogprobs(own, entropy), sums)
    correction_G = np.minimum(np.exp(np.bincount(owner_M, frozen_M - rollout_M, minlength=6)), 1.2)
    policy_M = -correction_G[owner_M] * np.exp(own_M - frozen_M) * batch.advantage_G[owner_M]
    terms_M = policy_M + 0.3 * (own_M - reference_M) ** 2 / 2 - 0.1 * entropy_M
    assert float(loss) == pytest.approx(terms_M.mean(), rel=1e-6)

    metrics, ratio_M = step_metrics(sums.totals() | {"grad_square": 0.0}, len(own_M)), np.exp(own_M - rollout_M)
    kl_M = ratio_M - 1 - np.log(ratio_M)
    assert metrics["policy/policy_kl"] == pytest.approx(kl_M.mean(), rel=1e-6)
    assert metrics["policy/is_ratio_std"] == pytest.approx(ratio_M.std(), rel=1e-6)
    fresh_M = micro.staleness_M.numpy() == 0
    assert metrics["policy/by_staleness/0/kl"] == pytest.approx(kl_M[fresh_M].mean(), rel=1e-6)


def test_a_ratio_that_is_not_a_number_counts_as_a_difference_of_engine_and_trainer() -> None:
    sums, nobody = Sums(CPU, 1), torch.zeros(3)
    log_ratio_M = torch.tensor([float("nan"), 0.05, 0.5])
    RatioMetrics(CPU, 0.1).add(sums, log_ratio_M, nobody.bool(), nobody.int())
    assert sums.totals()["differing/0"] == 2


@pytest.mark.parametrize("mode", ["advantage", "kl"])
def test_a_teacher_adds_its_term_where_it_knows_the_token_and_its_metrics(mode: str) -> None:
    rows = made_rows(6, seed=30)
    batch = mini_batch([[rows]], trajectories=6)
    [[micro]] = batch.ranks
    teacher_N = np.where(np.arange(len(micro.token_ids_N)) % 3 > 0, -3.0 - np.cos(micro.token_ids_N), np.nan)
    taught = replace(batch, ranks=((replace(micro, teacher_logprobs_N=teacher_N.astype(np.float32)),),))
    teacher = {"teacher": {"coef": 0.5, "mode": mode}}
    loss, gradient, sums = ours(rows, taught, teacher)
    plain, of_plain, _ = ours(rows, batch, {})
    mask_N = micro.loss_mask_N
    logprob_M, rollout_M, teacher_M = (
        x[mask_N] for x in (np.concatenate(own_logprobs(rows)), micro.logprobs_N, teacher_N)
    )
    weight, known_M = 1 / mask_N.sum(), ~np.isnan(teacher_M)
    teacher_M = np.where(known_M, teacher_M, 0)
    if mode == "kl":
        log_ratio_M = teacher_M - logprob_M
        terms_M = np.where(known_M, 0.5 * (np.exp(log_ratio_M) - 1 - log_ratio_M), 0)
        assert loss - plain == pytest.approx(weight * terms_M.sum(), rel=1e-5)
        assert gradient - of_plain == pytest.approx(
            weight * np.where(known_M, 0.5 * (1 - np.exp(log_ratio_M)), 0), rel=1e-5
        )
    else:
        owner_R = np.repeat(micro.trajectory_of_row_R, np.diff(micro.offsets_R))[mask_N]
        advantage_M = batch.advantage_G[owner_R] + np.where(known_M, 0.5 * (teacher_M - rollout_M), 0)
        terms_M = surrogate(np.exp(logprob_M - rollout_M), advantage_M)
        assert loss == pytest.approx(weight * terms_M.sum(), rel=1e-5)
    assert sums["teacher_tokens"] == known_M.sum() < len(known_M)
    assert sums["teacher_kl"] == pytest.approx((rollout_M - teacher_M)[known_M].sum(), rel=1e-5)
    without = ours(rows, batch, teacher)
    assert without[0] == plain and without[2]["teacher_tokens"] == 0


@pytest.mark.parametrize("mode", ["advantage", "kl"])
def test_the_expected_gradient_of_a_teacher_is_that_of_the_reverse_kl_divergence(mode: Any) -> None:
    """Enumerated over all tokens of a vocabulary of six, in float64."""
    torch.manual_seed(1)
    logits, teacher = torch.randn(6, dtype=torch.float64, requires_grad=True), torch.randn(6).double().log_softmax(0)
    policy = logits.log_softmax(0)
    (expected,) = torch.autograd.grad(0.7 * (policy.exp() * (policy - teacher)).sum(), logits)
    teaching, sampled = TeacherConfig(coef=0.7, mode=mode), logits.log_softmax(0)
    micro: Any = SimpleNamespace(rollout_logprob_M=sampled.detach(), teacher_logprob_M=teacher)
    inputs = LossInputs(sampled, sampled.detach(), teacher_advantage(teaching, micro), None)
    terms = loss_named("ppo_clip").function(inputs, AlgorithmConfig()).loss_M
    terms = terms + teacher_loss(teaching, "k2", sampled, micro)
    (found,) = torch.autograd.grad((sampled.detach().exp() * terms).sum(), logits)
    assert (found - expected).abs().max() < 1e-12


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
    _, gradient, _ = ours(rows, batch, algorithm)
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
    assert [name for name in LOSSES if name not in (AlgorithmConfig.model_fields["loss"].description or "")] == []


@pytest.mark.parametrize(
    ("estimator", "published"),
    [("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: np.exp(-d) - 1 + d)],
)
def test_kl_estimators_are_the_published_ones(estimator: str, published: Callable[[np.ndarray], np.ndarray]) -> None:
    logprob, reference = np.array([-1.0, -2.0, -0.5]), np.array([-1.5, -1.0, -0.5])
    ours = kl_term(estimator, torch.from_numpy(logprob), torch.from_numpy(reference))
    assert ours.numpy() == pytest.approx(published(logprob - reference))


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_the_mean_gradient_of_a_kl_estimator_is_that_of_the_divergence(estimator: str) -> None:
    logits_V = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    logprob_V, reference_V = logits_V.log_softmax(-1), torch.linspace(-3, 1, 4, dtype=torch.float64).log_softmax(-1)
    divergence = (logprob_V.exp() * (logprob_V - reference_V)).sum()
    mean = (logprob_V.exp().detach() * kl_term(estimator, logprob_V, reference_V)).sum()
    wanted, found = (torch.autograd.grad(of, logits_V, retain_graph=True)[0] for of in (divergence, mean))
    torch.testing.assert_close(found, wanted)


def test_a_ratio_far_out_stays_finite() -> None:
    inputs = LossInputs(torch.tensor([-1.0, -1e30]), torch.tensor([-1e30, -1.0]), torch.tensor([1.0, -1.0]), None)
    for name in ("ppo_clip", "dual_clip", "cispo", "rollout_is", "importance_sampling"):
        assert torch.isfinite(loss_named(name).function(inputs, AlgorithmConfig()).loss_M).all(), name
    for estimator in ("k1", "k2", "k3"):
        assert torch.isfinite(kl_term(estimator, inputs.logprob_M, inputs.anchor_M)).all(), estimator


def test_a_token_at_the_second_bound_of_dual_clip_counts_as_clipped() -> None:
    ratio_M = torch.tensor([5.0, 2.0, 5.0])
    inputs = LossInputs(ratio_M.log(), torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]), None)
    terms = loss_named("dual_clip").function(inputs, AlgorithmConfig())
    assert terms.loss_M.tolist() == pytest.approx([3.0, 2.0, -1.28])
    assert terms.clipped_M.tolist() == [True, False, True]


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
    with pytest.raises(ConfigError, match="exists already"):
        sys.modules.pop("my_losses")
        loss_named("my_losses:twice")


@pytest.mark.parametrize(
    ("line", "told"), [("x = y", "NameError: name 'y'"), ("exit(3)", "SystemExit: 3"), ("f(", "SyntaxError")]
)
def test_a_module_with_a_mistake_is_a_refusal_of_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, told: str
) -> None:
    (tmp_path / "mistaken_losses.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"algorithm.loss: the module 'mistaken_losses' cannot be imported: {told}"):
        loss_named("mistaken_losses:mine")


def test_a_loss_that_is_not_there_is_named_with_the_nearest(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'ppo_clip'"):
        Learner(settings({"loss": "ppo_clop"}), model_folder, CPU, 0, 1)
    with pytest.raises(ConfigError, match="'absent_module' cannot be imported"):
        loss_named("absent_module:mine")


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


# -- weights and masks for what another policy sampled -----------------------------------------------------------------

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
        ({"outlier_band": (0.6, 4.0)}, [False, False, False, True, True, False]),
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


def test_a_dummy_row_takes_nothing_even_from_an_advantage_that_is_not_a_number() -> None:
    value_N = expand_to_tokens(
        torch.tensor([torch.nan]), torch.tensor([-1]), row_of_token(torch.tensor([0, 2]), 2), torch.ones(2).bool()
    )
    assert value_N.tolist() == [0, 0]
