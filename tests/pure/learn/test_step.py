"""One mini-batch, one optimizer step: or none, and the reason."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from service.handoff.batches.batch import batch_of_rank
from service.learn.learner import Learner
from service.learn.supervised import SupervisedSteps
from service.types import SupervisedRow
from tests.pure.learn.builders import CPU, made_rows, mini_batch, settings


def assert_same_weights(one: Learner, other: Learner) -> None:
    ours, theirs = one.policy.weights(), other.policy.weights()
    assert ours is not None and theirs is not None and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_step_moves_the_policy_towards_tokens_with_positive_advantage(model_folder: Path) -> None:
    learner = Learner(settings(), model_folder, CPU, 0, 1)
    rows = made_rows(6, seed=4)
    batch = replace(mini_batch([[rows]], trajectories=6), advantage_G=np.ones(6, np.float32))
    first = learner.step(batch)
    assert first.applied and first.reason is None
    for _ in range(5):
        last = learner.step(batch)
    assert last.metrics["policy/is_ratio_mean"] > first.metrics["policy/is_ratio_mean"]
    assert last.metrics["policy/policy_loss"] < first.metrics["policy/policy_loss"]


def test_the_learning_rate_rises_over_the_warm_up_and_then_stays(model_folder: Path) -> None:
    learner = Learner(settings(trainer={"lr": 1.0e-4, "warmup_steps": 4}), model_folder, CPU, 0, 1)
    batch = mini_batch([[made_rows(4, seed=5)]], trajectories=4)
    rates = [learner.step(batch).metrics["policy/policy_lr"] for _ in range(6)]
    assert rates == pytest.approx([0.25e-4, 0.5e-4, 0.75e-4, 1e-4, 1e-4, 1e-4])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_leaves_weights_and_optimizer_untouched(model_folder: Path, poison: float) -> None:
    twin, learner = (Learner(settings(), model_folder, CPU, 0, 1) for _ in range(2))
    batch = mini_batch([[made_rows(4, seed=6)]], trajectories=4)
    advantage_G = batch.advantage_G.copy()
    advantage_G[2] = poison
    report = learner.step(replace(batch, advantage_G=advantage_G))
    assert not report.applied
    assert report.reason is not None and "policy/policy_loss" in report.reason
    assert learner.step(batch) == twin.step(batch)
    assert_same_weights(learner, twin)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_raised_half_way_leaves_no_gradients_to_the_next(model_folder: Path, dtype: str) -> None:
    trainer = {"max_tokens_per_micro_batch": 40}
    twin, learner = (Learner(settings(trainer=trainer, dtype=dtype), model_folder, CPU, 0, 1) for _ in range(2))
    rows = made_rows(4, seed=6)
    batch = mini_batch([[rows[:2], rows[2:]]], trajectories=4)
    demonstrations = [SupervisedRow(row.token_ids, row.loss_mask) for row in rows]
    supervised = {it: SupervisedSteps(settings(trainer=trainer, dtype=dtype), it.policy) for it in (twin, learner)}
    for step in (lambda it: it.step(batch), lambda it: supervised[it].step(demonstrations, 1e-3)):
        calls = iter((False, True))

        def fails_at_the_second(*_: object, calls: Iterator[bool] = calls) -> None:
            if next(calls):
                raise MemoryError

        hook = learner.policy.model.register_forward_pre_hook(fails_at_the_second)
        with pytest.raises(MemoryError):
            step(learner)
        hook.remove()
        assert step(learner) == step(twin)
    assert_same_weights(learner, twin)


def test_a_mini_batch_in_which_nothing_carries_loss_takes_no_step(model_folder: Path) -> None:
    rows = made_rows(3, seed=7)
    for row in rows:
        row.loss_mask[:] = False
    report = Learner(settings(), model_folder, CPU, 0, 1).step(mini_batch([[rows]], trajectories=3))
    assert not report.applied
    assert report.reason == "no token of the mini-batch carries loss"


def test_the_clip_takes_the_gradient_from_ratios_that_went_too_far(model_folder: Path) -> None:
    rows = made_rows(4, seed=8)
    for row in rows:
        row.logprobs[:] = np.where(row.loss_mask, -9.0, 0.0)  # far less likely when sampled than now
    batch = replace(mini_batch([[rows]], trajectories=4), advantage_G=np.ones(4, np.float32))
    report = Learner(settings(), model_folder, CPU, 0, 1).step(batch)
    assert report.metrics["policy/loss_metrics/clip_ratio"] == 1.0
    assert report.metrics["policy/grad_norm"] == 0.0


def test_in_bfloat16_steps_too_small_for_it_add_up_in_float32_masters(model_folder: Path) -> None:
    learner = Learner(settings(trainer={"lr": 1e-4}, dtype="bfloat16"), model_folder, CPU, 0, 1)
    batch = mini_batch([[made_rows(4, seed=9)]], trajectories=4)
    for steps, changed in ((5, False), (35, True)):
        for _ in range(steps):
            assert learner.step(batch).applied
        weights = learner.policy.weights()
        assert weights is not None
        norm = weights["model.norm.weight"]
        assert norm.dtype == torch.bfloat16
        # around 1 bfloat16 is spaced 2**-8 apart: 40 times what a step changes
        assert bool((norm != 1).any()) is changed


def test_an_exported_folder_loads_like_the_folder_it_came_from(model_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in model_folder.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "tokenizer.json").write_text("{}")
    learner = Learner(settings(), source, CPU, 0, 1)
    batch = mini_batch([[made_rows(4, seed=12)]], trajectories=4)
    learner.step(batch)
    for _ in range(2):  # the second time replaces the first
        learner.export(tmp_path / "final")
    names = {file.name for file in (tmp_path / "final").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "source"]
    assert_same_weights(learner, Learner(settings(), tmp_path / "final", CPU, 0, 1))
    assert "lm_head.weight" not in (learner.policy.weights() or {})


def test_a_mini_batch_for_more_ranks_than_there_are_is_not_trained_in_part(model_folder: Path) -> None:
    learner = Learner(settings(), model_folder, CPU, 0, 1)
    halves = mini_batch([[made_rows(4, seed=12)[:2]], [made_rows(4, seed=12)[2:]]], trajectories=4)
    with pytest.raises(ValueError, match=r"packed for 2 ranks, but 1 train"):
        learner.step(halves)
    with pytest.raises(ValueError, match="one rank's share cannot be trained alone"):
        learner.step(batch_of_rank(halves, 0))
    assert learner.steps == 0


def test_an_infinite_log_probability_of_the_rollout_takes_no_step(model_folder: Path) -> None:
    rows = made_rows(4, seed=13)
    rows[1].logprobs[-1] = -np.inf
    report = Learner(settings(), model_folder, CPU, 0, 1).step(mini_batch([[rows]], trajectories=4))
    assert not report.applied and report.reason is not None and "policy/policy_kl" in report.reason


def test_a_token_id_outside_of_the_vocabulary_is_named(model_folder: Path) -> None:
    rows = made_rows(4, seed=14)
    rows[1].token_ids[0] = 5000
    with pytest.raises(ValueError, match="token id 5000 is outside of the model's vocabulary of 37"):
        Learner(settings(), model_folder, CPU, 0, 1).step(mini_batch([[rows]], trajectories=4))


def test_the_spread_of_ratios_is_told_by_staleness_too(model_folder: Path) -> None:
    rows = made_rows(6, seed=15)
    report = Learner(settings(), str(model_folder), CPU, 0, 1).step(mini_batch([[rows]], trajectories=6))
    mask, staleness = (np.concatenate([getattr(row, name) for row in rows]) for name in ("loss_mask", "staleness"))
    metrics, largest, square = report.metrics, [], 0.0
    for name, at_least, below in (("0", 0, 1), ("1", 1, 2), ("2", 2, 3), ("3_4", 3, 5)):
        of = {key.rpartition("/")[2]: value for key, value in metrics.items() if f"by_staleness/{name}/" in key}
        assert of["tokens"] == np.count_nonzero(mask & (staleness >= at_least) & (staleness < below))
        mean_square = of["is_ratio_std"] ** 2 + of["is_ratio_mean"] ** 2
        assert of["effective_sample_fraction"] == pytest.approx(of["is_ratio_mean"] ** 2 / mean_square)
        largest.append(of["is_ratio_max"])
        square += of["tokens"] * mean_square / mask.sum()
    assert max(largest) == metrics["policy/is_ratio_max"]
    assert square == pytest.approx(metrics["policy/is_ratio_std"] ** 2 + metrics["policy/is_ratio_mean"] ** 2)
