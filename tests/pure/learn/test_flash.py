"""FlashAttention 4 behind an operator of its own: on CPU a stand-in with the package's arguments computes."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
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
from tests.pure.learn.varlen import FLASH_4, use_flash4

ROOT = Path(__file__).parents[3]
GPU = torch.device("cuda")
LENGTHS = (5, 130, 1, 64)

COMPILE = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from service.learn.model import flash
import flash_attn.cute.interface
flash._kernels = flash_attn.cute.interface
with FakeTensorMode():
    made = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="cuda")
    for head_dim, window in ((64, 31), (128, -1), (256, -1)):
        query, key, value, bounds = *(made(200, n, head_dim) for n in (8, 2, 2)), made(5, dtype=torch.int32)
        named = flash._named(bounds, bounds, 130, 130, 0.1, window=window)
        out, log_sum, *_ = flash._kernels._flash_attn_fwd(query, key, value, return_lse=True, **named)
        assert log_sum.shape == (8, 200)
        parts = flash._kernels._flash_attn_bwd(query, key, value, out, out, log_sum, **named)
        assert [part.shape for part in parts] == [query.shape, key.shape, value.shape]
"""
HOPPER = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flash, "_kernels", None)
    attention.use_fastest_attention.cache_clear()
    yield
    attention.use_fastest_attention.cache_clear()


def installed() -> Path:
    """The source of the installed package's functions."""
    try:
        package = metadata.distribution("flash-attn-4")
    except metadata.PackageNotFoundError:
        pytest.skip("needs flash-attn-4, which the CUDA profile has")
    assert package.version == flash.VERSION
    return Path(str(package.locate_file("flash_attn/cute/interface.py")))


def given(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    n_tokens = sum(LENGTHS)
    return [torch.randn(1, n, n_tokens, 16, dtype=dtype, generator=generator).requires_grad_() for n in (8, 2, 2)]


def packing() -> Packing:
    return Packing.of(np.cumsum([0, *LENGTHS], dtype=np.int64), CPU, variable_length=True)


@pytest.mark.parametrize("window", [None, 7])
def test_output_and_gradients_are_those_of_causal_attention_in_each_row(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    use_flash4(monkeypatch)
    inputs = given()
    named = {"sliding_window": window, "scaling": 0.3}
    out, _ = attention.packed_attention(torch.nn.Identity(), *inputs, None, packing(), **named)  # type: ignore[arg-type]
    parts = []
    for start, end in pairwise(np.cumsum([0, *LENGTHS])):
        reach = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        reach &= ~torch.ones_like(reach).tril(-(window or end - start))
        query, key, value = (x[:, :, start:end] for x in inputs)
        parts.append(F.scaled_dot_product_attention(query, key, value, reach, scale=0.3, enable_gqa=True))
    expected = torch.cat(parts, 2).transpose(1, 2)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(out, expected)
    for ours, right in zip(*(torch.autograd.grad(x, inputs, weight) for x in (out, expected)), strict=True):
        torch.testing.assert_close(ours, right)


def test_both_passes_know_the_longest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = use_flash4(monkeypatch)
    out, _ = attention.packed_attention(torch.nn.Identity(), *given(), None, packing())  # type: ignore[arg-type]
    out.sum().backward()
    assert [name for name, _ in kernels.calls] == ["_flash_attn_fwd", "_flash_attn_bwd"]
    assert {(said["max_seqlen_q"], said["max_seqlen_k"]) for _, said in kernels.calls} == {(130, 130)}


def test_the_operators_keep_the_rules_that_torch_s_compiler_relies_on(monkeypatch: pytest.MonkeyPatch) -> None:
    use_flash4(monkeypatch)
    bounds = packing().cu_seqlens
    tensors = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in given()]
    torch.library.opcheck(flash.attend, (*tensors, bounds, bounds, 130, 130, 0.25, -1))


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
        (flash.VERSION, 9, True, "FA4", ["attention: FlashAttention 4"]),
        (flash.VERSION, 10, True, "FA4", ["attention: FlashAttention 4"]),
        (flash.VERSION, 8, True, "FA2", ["attention: FlashAttention 2"]),
        ("4.0.0b8", 9, True, "FA2", [f"its version is 4.0.0b8, not {flash.VERSION}", "attention: FlashAttention 2"]),
        (flash.VERSION, 9, False, "FA2", ["a small attention came out wrong", "attention: FlashAttention 2"]),
        (None, 9, True, "FA2", ["attention: FlashAttention 2"]),
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
    assert [attention.use_fastest_attention(GPU) for _ in range(2)] == [chosen, chosen]
    assert (flash._kernels is not None) == (chosen == "FA4")
    assert len(caplog.messages) == len(said)
    assert all(part in line for part, line in zip(said, caplog.messages, strict=True))


def test_the_pinned_version_is_the_one_whose_arguments_are_recorded() -> None:
    pin = f"flash-attn-4=={flash.VERSION}"
    assert FLASH_4["version"] == flash.VERSION
    assert pin in (ROOT / "requirements" / "cuda.txt").read_text().splitlines()
    assert pin in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cuda"]


def test_the_recorded_arguments_are_those_of_the_installed_package() -> None:
    found = {node.name: node for node in ast.parse(installed().read_text()).body if isinstance(node, ast.FunctionDef)}
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        arguments, returns = found[name].args, found[name].returns
        assert returns is not None
        assert FLASH_4[name] == {
            "arguments": [argument.arg for argument in arguments.args],
            "required": len(arguments.args) - len(arguments.defaults),
            "returns": ast.unparse(returns),
        }


@pytest.mark.timeout(300)
def test_its_kernels_compile_for_hopper_without_a_gpu() -> None:
    installed()
    environment = {**os.environ, **HOPPER}
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
