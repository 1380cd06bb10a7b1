"""What runs fast by default on a GPU, as far as a CPU can show it: which layers are compiled, how often, and that it is
the same computation; which attention kernel is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
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
from tests.pure.learn.builders import CPU, SHAPE, VOCABULARY, made_rows, mini_batch, settings
from tests.pure.learn.ranks import Ranks
from tests.pure.learn.varlen import eager_graphs

GPU = torch.device("cuda")
LAYERS = 4
DENSE = SimpleNamespace()
MIXTURE = SimpleNamespace(num_experts=8)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    yield
    compile.compiler_works.cache_clear()
    attention.use_fastest_attention.cache_clear()


@pytest.mark.parametrize(
    ("setting", "device", "model", "dtype", "works", "compiled"),
    [
        (None, GPU, DENSE, torch.bfloat16, True, True),
        (None, GPU, DENSE, torch.bfloat16, False, False),
        (None, GPU, DENSE, torch.float32, True, False),
        (None, GPU, MIXTURE, torch.bfloat16, True, False),
        (None, CPU, DENSE, torch.bfloat16, True, False),
        (False, GPU, DENSE, torch.bfloat16, True, False),
        (True, CPU, MIXTURE, torch.float32, False, True),
    ],
)
def test_dense_layers_are_compiled_by_default_on_gpus_whose_compiler_works(
    monkeypatch: pytest.MonkeyPatch,
    setting: bool | None,
    device: torch.device,
    model: Any,
    dtype: torch.dtype,
    works: bool,
    compiled: bool,
) -> None:
    monkeypatch.setattr(compile, "compiler_works", lambda _: works)
    assert compile.compiles_layers(model, TrainerConfig(compile=setting), device, dtype) is compiled
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


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layered") / "policy"
    shape = SHAPE.model_copy(update={"num_layers": LAYERS})
    make_model(folder, shape, VOCABULARY, eos_token_id=2, pad_token_id=0, seed=0)
    return folder


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_all_layers_and_all_sizes_share_one_compiled_graph_that_computes_the_same(
    layered: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    eager_graphs(monkeypatch)
    original = DeviceBatch.of
    variable = lambda micro, said: original(micro, said._replace(variable_length=True))  # noqa: E731
    monkeypatch.setattr(DeviceBatch, "of", staticmethod(variable))
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = (
        Learner(settings(trainer={"compile": on, "gradient_checkpointing": checkpointing}), layered, CPU, 0, 1)
        for on in (False, True)
    )
    for trajectories in (3, 4, 6):
        batch = mini_batch([[made_rows(trajectories, seed=trajectories)]], trajectories=trajectories)
        expected, found = plain.step(batch).metrics, compiled.step(batch).metrics
        for name in ("policy/policy_loss", "policy/grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


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
    assert attention.use_fastest_attention(device) == kernel
    assert activated == (["FA3"] if kernel == "FA3" or fails else [])
    assert [str(fails) in message for message in caplog.messages] == ([True] if fails else [])
