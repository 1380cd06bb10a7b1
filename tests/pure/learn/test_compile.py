"""What runs fast by default on a GPU, as far as a CPU can show it: which layers are compiled, how often, and that it is
the same computation; which attention kernel is chosen."""

from __future__ import annotations

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
from service.learn.device_batch import DeviceBatch
from service.learn.learner import Learner
from service.learn.model import attention
from service.learn.model.tiny_model import make_model
from service.types import MiniBatch
from tests.pure.learn.builders import CPU, SHAPE, VOCABULARY, made_rows, mini_batch, settings
from tests.pure.learn.ranks import Ranks
from tests.pure.learn.test_families import replayed, saved
from tests.pure.learn.varlen import eager_graphs, use_flash4

GPU = torch.device("cuda")
LAYERS = 4


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    yield
    compile.compiler_works.cache_clear()
    attention.use_fastest_attention.cache_clear()


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
    assert compile.compiler_works(CPU)


def test_a_compiler_that_is_first_asked_where_gradients_are_off_works_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with torch.no_grad():
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


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layered") / "policy"
    shape = SHAPE | {"num_hidden_layers": LAYERS}
    make_model(folder, shape, VOCABULARY, eos_token_id=2, pad_token_id=0, seed=0)
    return folder


def plain_and_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool) -> list[Learner]:
    """A learner without and one with compiled layers, whose graphs are counted, with the kernel of a GPU."""
    eager_graphs(monkeypatch)
    original = DeviceBatch.of
    variable = lambda micro, said: original(micro, said._replace(variable_length=True))  # noqa: E731
    monkeypatch.setattr(DeviceBatch, "of", staticmethod(variable))
    torch._dynamo.reset()
    counters.clear()
    trainer = {"gradient_checkpointing": checkpointing}
    return [Learner(settings(trainer=trainer | {"compile": on}), folder, CPU, 0, 1) for on in (False, True)]


def assert_same_step(learners: list[Learner], batch: MiniBatch) -> None:
    expected, found = (learner.step(batch).metrics for learner in learners)
    for name in ("policy/policy_loss", "policy/grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize(("checkpointing", "flash4"), [(False, False), (True, False), (False, True)])
def test_all_layers_and_all_sizes_share_one_compiled_graph_that_computes_the_same(
    layered: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool, flash4: bool
) -> None:
    kernels = use_flash4(monkeypatch) if flash4 else None
    learners = plain_and_compiled(layered, monkeypatch, checkpointing)
    for trajectories in (3, 4, 6):
        batch = mini_batch([[made_rows(trajectories, seed=trajectories)]], trajectories=trajectories)
        assert_same_step(learners, batch)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert kernels is None or {name for name, _ in kernels.calls} == {"_flash_attn_fwd", "_flash_attn_bwd"}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_with_experts_share_a_graph_before_and_one_after_them_whatever_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    folder = saved("qwen2_moe", tmp_path)  # experts in all three layers
    learners = plain_and_compiled(folder, monkeypatch, checkpointing)
    for trajectories, natively in ((3, None), (4, 0.3), (6, 1.0), (5, 0.0)):
        batch = mini_batch([[made_rows(trajectories, seed=trajectories)]], trajectories=trajectories)
        if natively is not None:
            micros = tuple(tuple(replayed(micro, 3, natively) for micro in of_rank) for of_rank in batch.ranks)
            batch = replace(batch, ranks=micros)
        assert_same_step(learners, batch)
    assert counters["stats"]["unique_graphs"] == 2


def steps(rank: int, world_size: int, folder: Path, is_compiled: bool) -> tuple[list[float], int]:
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        eager_graphs(patch)
        learner = Learner(settings(trainer={"compile": is_compiled}), folder, CPU, rank, world_size)
        rows = made_rows(6, seed=80)
        mine = [[[row for row in rows if row.trajectory % world_size == r]] for r in range(world_size)]
        batch = mini_batch(mine, 6)
        return [learner.step(batch).metrics["policy/grad_norm"] for _ in range(2)], counters["stats"]["unique_graphs"]


@pytest.mark.full
def test_compiled_layers_share_their_graph_where_they_are_sharded_too(layered: Path, ranks: Ranks) -> None:
    plain, _ = steps(0, 1, layered, False)
    for found, graphs in ranks(2, steps, layered, True):
        assert found == pytest.approx(plain, rel=1e-4)
        assert graphs == 1


@pytest.mark.parametrize(
    ("device", "wheel", "capability", "fails", "kernel"),
    [
        (GPU, True, (9, 0), None, "FA3"),
        (GPU, True, (10, 0), None, "FA2"),
        (GPU, True, (8, 0), None, "FA2"),
        (GPU, False, (9, 0), None, "FA2"),
        (GPU, True, (9, 0), ImportError("undefined symbol: aoti_torch"), "FA2"),
        (CPU, True, (9, 0), None, "FA2"),
    ],
)
def test_flash_attention_3_computes_on_hopper_where_its_wheel_works(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: torch.device,
    wheel: bool,
    capability: tuple[int, int],
    fails: Exception | None,
    kernel: str,
) -> None:
    activated: list[str] = []

    def activate(name: str) -> None:
        activated.append(name)
        if fails is not None:
            raise fails

    assert hasattr(torch.nn.attention, "activate_flash_attention_impl"), "the locked torch has it"
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(attention, "find_spec", lambda name: object() if wheel else None)
    monkeypatch.setattr(attention.flash, "begin", lambda _: False)
    assert attention.use_fastest_attention(device) == kernel
    assert activated == (["FA3"] if kernel == "FA3" or fails else [])
    assert [str(fails) in message for message in caplog.messages] == ([True] if fails else [])
