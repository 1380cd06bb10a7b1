"""Copies to CPU memory are copies, and pinned where they come from a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from service.learn.learner import Learner
from service.learn.model.sharding import begin_host_copy, finish_host_copies, host_copy
from tests.pure.learn.builders import CPU, made_rows, mini_batch, settings


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
        copy = begin_host_copy(there, torch.bfloat16)
    assert (copy.device.type, copy.dtype, tuple(copy.shape)) == ("cpu", torch.bfloat16, (4, 3))
    assert asked == [is_pinned]


def test_a_host_copy_is_whole_and_does_not_change_with_its_source() -> None:
    source = torch.arange(6.0).view(2, 3).t().requires_grad_()
    copies = [host_copy(source), begin_host_copy(source)]
    finish_host_copies()
    with torch.no_grad():
        source.zero_()
    for copy in copies:
        assert copy.tolist() == [[0, 3], [1, 4], [2, 5]] and copy.is_contiguous() and not copy.requires_grad


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
