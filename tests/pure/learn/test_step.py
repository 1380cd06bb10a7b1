"""One mini-batch, one optimizer step: or none, and the reason."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from service.learn.learner import Learner
from service.learn.model import host_copies
from service.learn.model.host_copies import HostCopies, host_copy
from service.learn.model.optimizer import learning_rate
from service.learn.supervised import SupervisedSteps
from service.types import SupervisedRow
from tests.pure.learn.builders import CPU, made_rows, mini_batch, settings
from tests.step_keys import without_meaning


def assert_same_weights(one: Learner, other: Learner) -> None:
    ours, theirs = one.policy.weights(), other.policy.weights()
    assert ours is not None and theirs is not None and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("schedule", "halfway", "end"), [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)]
)
def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_the_share_at_the_end(
    model_folder: Path, schedule: Any, halfway: float, end: float
) -> None:
    trainer = {"lr": 2.0e-4, "warmup_steps": 10, "schedule": schedule, "min_lr_fraction": 0.1}
    config = settings(trainer=trainer)
    rates = [1e4 * learning_rate(config.trainer, step, max_steps=110) for step in (0, 9, 10, 60, 110, 200)]
    assert rates == pytest.approx([0.2, 2.0, 2.0, 2.0 * halfway, 2.0 * end, 2.0 * end])
    learner = Learner(config, model_folder, CPU, 0, 1)
    batch = mini_batch([[made_rows(4, seed=5)]], trajectories=4)
    taken = [learner.step(batch).metrics["policy/policy_lr"] for _ in range(2)]
    assert taken == pytest.approx([0.2e-4, 0.4e-4])


@pytest.mark.parametrize(
    ("advantage", "logprob", "masked", "reason"),
    [
        (np.nan, -4.0, False, "policy/policy_loss"),
        (np.inf, -4.0, False, "policy/policy_loss"),
        (1.0, -np.inf, False, "policy/policy_kl"),
        (1.0, -4.0, True, "no token of the mini-batch carries loss"),
    ],
)
def test_a_mini_batch_whose_loss_is_not_finite_or_of_no_token_takes_no_step_and_changes_nothing(
    model_folder: Path, advantage: float, logprob: float, masked: bool, reason: str
) -> None:
    twin, learner = (Learner(settings(), model_folder, CPU, 0, 1) for _ in range(2))
    good, rows = mini_batch([[made_rows(4, seed=6)]], trajectories=4), made_rows(4, seed=6)
    rows[1].logprobs[-1] = logprob
    for row in rows if masked else ():
        row.loss_mask[:] = False
    bad = mini_batch([[rows]], trajectories=4)
    bad.advantage_G[2] = advantage
    report = learner.step(bad)
    assert not report.applied and reason in (report.reason or "")
    assert learner.step(good) == twin.step(good)
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
    assert learner.steps == 0


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
    assert without_meaning(metrics) == []
    for name, at_least, below in (("0", 0, 1), ("1", 1, 2), ("2", 2, 3), ("3_4", 3, 5)):
        of = {key.rpartition("/")[2]: value for key, value in metrics.items() if f"by_staleness/{name}/" in key}
        assert of["tokens"] == np.count_nonzero(mask & (staleness >= at_least) & (staleness < below))
        mean_square = of["is_ratio_std"] ** 2 + of["is_ratio_mean"] ** 2
        assert of["effective_sample_fraction"] == pytest.approx(of["is_ratio_mean"] ** 2 / mean_square)
        largest.append(of["is_ratio_max"])
        square += of["tokens"] * mean_square / mask.sum()
    assert max(largest) == metrics["policy/is_ratio_max"]
    assert square == pytest.approx(metrics["policy/is_ratio_std"] ** 2 + metrics["policy/is_ratio_mean"] ** 2)


# -- copies to CPU memory ----------------------------------------------------------------------------------------------


def spied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each new tensor asked for pinned memory, which a build without CUDA does not have."""
    asked: list[bool] = []
    empty: Callable[..., torch.Tensor] = torch.empty

    def spy(*shape: Any, pin_memory: bool = False, **said: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*shape, **said)

    monkeypatch.setattr(torch, "empty", spy)
    return asked


@pytest.mark.parametrize(("device", "is_pinned"), [("cuda", True), ("cpu", False)])
def test_a_copy_of_a_tensor_on_a_gpu_is_pinned(monkeypatch: pytest.MonkeyPatch, device: str, is_pinned: bool) -> None:
    with FakeTensorMode():
        there = torch.zeros(4, 3, device=device)
        asked = spied(monkeypatch)
        copy = host_copy(there, torch.bfloat16)
    assert (copy.device.type, copy.dtype, tuple(copy.shape)) == ("cpu", torch.bfloat16, (4, 3))
    assert asked == [is_pinned]


def test_a_host_copy_is_whole_and_does_not_change_with_its_source() -> None:
    source = torch.arange(6.0).view(2, 3).t().requires_grad_()
    copy, copies = host_copy(source), HostCopies().take([source, torch.ones(3)])
    with torch.no_grad():
        source.zero_()
    assert copies.view(torch.float32).tolist() == [0, 3, 1, 4, 2, 5, 1, 1, 1]
    assert copy.tolist() == [[0, 3], [1, 4], [2, 5]] and copy.is_contiguous() and not copy.requires_grad


def test_copies_for_checkpoints_are_pinned_once_and_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(host_copies, "register", lambda octets: pinned.append(octets.nbytes))
    large, copies = torch.ones(1 << 18).add_(0.5)[:200_000], HostCopies()
    for _ in range(3):
        large += 1
        taken = copies.take([large, torch.ones(0), torch.ones(1).byte()])
        assert torch.equal(taken[:-1].view(torch.float32), large) and taken[-1] == 1
    assert pinned == [800_001]


def test_gradients_that_are_offloaded_add_up_over_micro_batches(model_folder: Path) -> None:
    rows = made_rows(6, seed=7)
    batch = mini_batch([[rows[:2], rows[2:4], rows[4:]]], trajectories=6)
    found = []
    for offloaded in (False, True):
        learner = Learner(settings(trainer={"cpu_offload": offloaded}, dtype="bfloat16"), model_folder, CPU, 0, 1)
        learner.accumulate(batch)
        found.append(learner.policy.master_weights.gradients())
    for kept, moved in zip(*found, strict=True):
        torch.testing.assert_close(kept, moved, rtol=0, atol=0)


def test_the_weights_of_a_learner_are_freed_with_the_learner(model_folder: Path) -> None:
    learner = Learner(settings(dtype="bfloat16"), model_folder, CPU, 0, 1)
    learner.step(mini_batch([[made_rows(6, seed=7)]], trajectories=6))
    masters = learner.policy.master_weights
    held = [weakref.ref(weight) for weight in (*masters.parameters.values(), *masters.tensors.values())]
    del learner, masters
    gc.collect()
    assert [weight() for weight in held] == [None] * len(held)
