"""What runs fast by default on a GPU, as far as a CPU can show it: which layers are compiled, how often, and that it is
the same computation."""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from service.config.learn import TrainerConfig
from service.learn import compile
from service.learn.learner import Learner
from service.types import MiniBatch
from tests.pure.learn.builders import CPU, made_rows, mini_batch, settings
from tests.pure.learn.families import replayed, saved
from tests.pure.learn.varlen import COMPILER_WARNS, as_on_gpu, eager_graphs, use_flash4

GPU = torch.device("cuda")
pytestmark = COMPILER_WARNS


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    yield
    compile.compiler_works.cache_clear()


@pytest.mark.parametrize(
    ("setting", "device", "dtype", "works", "compiled"),
    [
        (None, GPU, torch.bfloat16, True, True),
        (None, GPU, torch.bfloat16, False, False),
        (None, GPU, torch.float32, True, False),
        (None, CPU, torch.bfloat16, True, False),
        (False, GPU, torch.bfloat16, True, False),
        (True, CPU, torch.float32, False, True),
    ],
)
def test_layers_are_compiled_by_default_on_gpus_whose_compiler_works(
    monkeypatch: pytest.MonkeyPatch,
    setting: bool | None,
    device: torch.device,
    dtype: torch.dtype,
    works: bool,
    compiled: bool,
) -> None:
    monkeypatch.setattr(compile, "compiler_works", lambda _: works)
    assert compile.compiles_layers(TrainerConfig(compile=setting), device, dtype) is compiled
    assert TrainerConfig().compile is None


def test_a_compiler_that_does_not_work_is_said_in_one_line_and_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            raise RuntimeError("Failed to find C compiler.\nPlease specify one")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    with caplog.at_level(logging.WARNING):
        assert [compile.compiler_works(CPU) for _ in range(2)] == [False, False]
    assert caplog.messages == [
        "torch.compile does not work on cpu (RuntimeError: Failed to find C compiler.): layers run eagerly"
    ]
    compile.compiler_works.cache_clear()
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with torch.no_grad():  # as inside an autograd function
        assert compile.compiler_works(CPU)


@pytest.mark.parametrize(("cores", "ranks_of_host", "threads"), [(224, 8, 28), (224, 1, 32), (4, 8, 1)])
def test_the_ranks_of_a_host_share_its_cores_for_compilation_unless_told_otherwise(
    cores: int, ranks_of_host: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv(compile.COMPILE_THREADS, raising=False)
    with torch._inductor.config.patch(compile_threads=99):
        compile.share_cores(ranks_of_host)
        assert torch._inductor.config.compile_threads == threads
    monkeypatch.setenv(compile.COMPILE_THREADS, "99")
    with torch._inductor.config.patch(compile_threads=99):
        compile.share_cores(ranks_of_host)
        assert torch._inductor.config.compile_threads == 99


def assert_compiled_and_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool, batches: list[MiniBatch]
) -> None:
    """Steps of a learner with compiled layers are those of one without, with the kernel of a GPU."""
    eager_graphs(monkeypatch)
    as_on_gpu(monkeypatch)
    trainer = {"gradient_checkpointing": checkpointing}
    learners = [Learner(settings(trainer=trainer | {"compile": on}), folder, CPU, 0, 1) for on in (False, True)]
    for batch in batches:
        expected, found = (learner.step(batch).metrics for learner in learners)
        for name in ("policy/policy_loss", "policy/grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5)


def batch_of(trajectories: int) -> MiniBatch:
    return mini_batch([[made_rows(trajectories, seed=trajectories)]], trajectories)


@pytest.mark.parametrize(("checkpointing", "flash4"), [(True, False), (False, True)])
def test_all_layers_and_all_sizes_share_one_compiled_graph_that_computes_the_same(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool, flash4: bool
) -> None:
    kernels = use_flash4(monkeypatch) if flash4 else None
    assert_compiled_and_same(model_folder, monkeypatch, checkpointing, [batch_of(n) for n in (3, 4, 6)])
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert kernels is None or {name for name, *_ in kernels.calls} == {"_flash_attn_fwd", "_flash_attn_bwd"}


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.full)])
def test_layers_with_experts_share_a_graph_before_and_one_after_them_whatever_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    batches = [batch_of(3)]
    for trajectories, natively in ((4, 0.3), (6, 1.0), (5, 0.0)):
        batch = batch_of(trajectories)
        batches.append(replace(batch, ranks=((replayed(batch.ranks[0][0], 3, natively),),)))
    folder = saved("qwen2_moe", tmp_path)  # experts in all three layers
    assert_compiled_and_same(folder, monkeypatch, checkpointing, batches)
    assert counters["stats"]["unique_graphs"] == 2
