"""FlashAttention 4 behind an operator of its own: on CPU a stand-in with the package's arguments computes."""

import ast
import logging
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from service.learn.model import attention, flash
from tests.pure.learn.builders import CPU
from tests.pure.learn.varlen import use_flash4

ROOT = Path(__file__).parents[3]
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flash, "_kernels", None)
    attention.use_fastest_attention.cache_clear()
    yield
    attention.use_fastest_attention.cache_clear()


@pytest.mark.parametrize(
    ("head_dim", "on_gpu", "taken"),
    [(64, True, True), (256, True, True), (192, True, False), (36, True, False), (64, False, False)],
)
def test_what_it_does_not_take_another_kernel_computes(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, on_gpu: bool, taken: bool
) -> None:
    class Query:
        shape, is_cuda = (10, 8, head_dim), on_gpu

    assert not flash.takes(Query())  # type: ignore[arg-type]
    monkeypatch.setattr(flash, "_kernels", object())
    assert flash.takes(Query()) == taken  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "capability", "works", "chosen", "said"),
    [
        (flash.VERSION, 9, True, "FA4", []),
        (flash.VERSION, 10, True, "FA4", []),
        (flash.VERSION, 8, True, "FA2", []),
        ("4.0.0b8", 9, True, "FA2", [f"its version is 4.0.0b8, not {flash.VERSION}"]),
        (flash.VERSION, 9, False, "FA2", ["a small attention came out wrong"]),
        (None, 9, True, "FA2", []),
    ],
)
def test_it_computes_where_its_version_the_gpu_and_a_small_example_are_right_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str | None,
    capability: int,
    works: bool,
    chosen: str,
    said: list[str],
) -> None:
    class Wrong(type(use_flash4(monkeypatch))):  # type: ignore[misc]
        def _flash_attn_bwd(self, *args: Any, **named: Any) -> tuple[torch.Tensor, ...]:
            of_query, of_key, of_value = super()._flash_attn_bwd(*args, **named)
            return of_query, of_key, of_value if works else 1.2 * of_value

    def version_of(_: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(flash, "_kernels", None)
    monkeypatch.setattr(flash.metadata, "version", version_of)
    monkeypatch.setattr(flash, "import_module", lambda _: Wrong())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    original = flash._try_out
    monkeypatch.setattr(flash, "_try_out", lambda _: original(CPU))
    caplog.set_level(logging.INFO)
    assert [attention.use_fastest_attention(each) for each in (GPU, GPU, CPU)] == [chosen, chosen, "FA2"]
    assert (flash._kernels is not None) == (chosen == "FA4")
    lines = [*said, f"attention: FlashAttention {chosen[2:]}"]
    assert all(part in line for part, line in zip(lines, caplog.messages, strict=True))


def test_the_pinned_version_is_the_one_that_is_called() -> None:
    pin = f"flash-attn-4=={flash.VERSION}"
    assert pin in (ROOT / "requirements" / "cuda.txt").read_text().splitlines()
    assert pin in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cuda"]


def test_the_arguments_of_the_stand_in_are_those_of_the_installed_package() -> None:
    try:
        package = metadata.distribution("flash-attn-4")
    except metadata.PackageNotFoundError:
        pytest.skip("needs flash-attn-4, which the CUDA profile has")
    source = ast.parse(Path(str(package.locate_file("flash_attn/cute/interface.py"))).read_text())
    found = {node.name: node.args for node in source.body if isinstance(node, ast.FunctionDef)}
    named = {*flash._named(0, 0, 1, 1, 0.5, window=-1)}
    for name, first, more in (
        ("_flash_attn_fwd", ["q", "k", "v"], {"return_lse"}),
        ("_flash_attn_bwd", ["q", "k", "v", "out", "dout", "lse"], set[str]()),
    ):
        arguments = [argument.arg for argument in found[name].args]
        assert arguments[: len(first)] == first and len(first) == len(arguments) - len(found[name].defaults)
        assert named | more <= {*arguments}
