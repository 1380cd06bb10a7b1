"""FlashAttention 4 behind an operator of its own: on CPU a stand-in with the package's arguments computes."""

from __future__ import annotations

import ast
import logging
import tomllib
from collections.abc import Iterator
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from service.learn.attention_layout import Packing
from service.learn.model import attention, flash
from tests.pure.learn.builders import CPU
from tests.pure.learn.varlen import use_flash4

ROOT = Path(__file__).parents[3]
GPU = torch.device("cuda")
LENGTHS = (5, 130, 1, 64)
BOUNDS = np.cumsum([0, *LENGTHS], dtype=np.int64)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flash, "_kernels", None)
    attention.use_fastest_attention.cache_clear()
    yield
    attention.use_fastest_attention.cache_clear()


def packed(window: int | None = None) -> tuple[list[torch.Tensor], torch.Tensor, Packing]:
    """Queries, keys and values [1, heads, T, head_dim], and the output of packed attention over their rows."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, n, sum(LENGTHS), 16, generator=generator).requires_grad_() for n in (8, 2, 2)]
    packing = Packing.of(BOUNDS, CPU, variable_length=True)
    named: dict[str, Any] = {"sliding_window": window, "scaling": 0.3}
    return inputs, attention.packed_attention(torch.nn.Identity(), *inputs, None, packing, **named)[0], packing


@pytest.mark.parametrize("window", [None, 7])
def test_output_and_gradients_are_those_of_causal_attention_in_each_row(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    kernels = use_flash4(monkeypatch)
    inputs, out, packing = packed(window)
    parts = []
    for start, end in pairwise(BOUNDS):
        reach = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        reach &= ~torch.ones_like(reach).tril(-(window or end - start))
        query, key, value = (x[:, :, start:end] for x in inputs)
        parts.append(F.scaled_dot_product_attention(query, key, value, reach, scale=0.3, enable_gqa=True))
    expected = torch.cat(parts, 2).transpose(1, 2)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(out, expected)
    for ours, right in zip(*(torch.autograd.grad(x, inputs, weight) for x in (out, expected)), strict=True):
        torch.testing.assert_close(ours, right)
    assert kernels.calls == [("_flash_attn_fwd", 130, 130), ("_flash_attn_bwd", 130, 130)]
    if window is not None:
        return
    tensors = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in inputs]
    # the rules that torch's compiler relies on
    torch.library.opcheck(flash.attend, (*tensors, packing.cu_seqlens, packing.cu_seqlens, 130, 130, 0.25, -1))


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
