"""Fused kernels compute the experts where they are installed and agree with grouped products; the log says which."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.integrations import moe

from service.learn.model import experts
from service.learn.model.experts import FUSED, GROUPED, use_fastest_experts
from tests.pure.learn.builders import CPU
from tests.pure.learn.test_families import COMMON, FAMILIES
from tests.pure.learn.test_families import EXPERTS as SHAPE

QWEN = Qwen3MoeConfig(**COMMON, **SHAPE, head_dim=8, mlp_only_layers=[1])
GPT_OSS = GptOssConfig(**COMMON, num_local_experts=6, num_experts_per_tok=2, head_dim=8, layer_types=None)


def layers_of(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).model.layers


def installed(monkeypatch: pytest.MonkeyPatch, forward: Callable[..., Tensor]) -> None:
    """Let `forward` take the place of the fused kernels, on a machine that could have them."""
    monkeypatch.setattr(experts, "is_sonicmoe_loadable", lambda raise_error: True)
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, FUSED, forward)


def rounded(*arguments: Any) -> Tensor:
    return moe.batched_mm_experts_forward(*arguments)


def doubled(*arguments: Any) -> Tensor:
    return 2 * moe.grouped_mm_experts_forward(*arguments)


def without_gradient_of_the_router(own: Any, hidden: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    return moe.grouped_mm_experts_forward(own, hidden, chosen, weight.detach() + 0 * weight)


def broken(*arguments: Any) -> Tensor:
    raise ImportError("no build for this torch\nand more")


@pytest.mark.parametrize(
    ("forward", "chosen", "said"),
    [
        (rounded, FUSED, "by the fused kernels of SonicMoE"),
        (doubled, GROUPED, "they differ from grouped products by 3.0e"),
        (without_gradient_of_the_router, GROUPED, "they differ from grouped products by 1.0e"),
        (broken, GROUPED, "ImportError: no build for this torch"),
    ],
)
def test_fused_kernels_compute_experts_where_output_and_gradients_are_those_of_grouped_products(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    forward: Callable[..., Tensor],
    chosen: str,
    said: str,
) -> None:
    installed(monkeypatch, forward)
    layers = layers_of(QWEN)
    before = layers[0].mlp.experts.config._experts_implementation
    with caplog.at_level(logging.INFO):
        assert use_fastest_experts(layers, CPU, torch.bfloat16) == chosen
    assert [said in message and "\n" not in message for message in caplog.messages] == [True]
    assert layers[2].mlp.experts.config._experts_implementation == (FUSED if chosen == FUSED else before)


def test_a_gate_that_the_kernels_do_not_have_is_computed_by_grouped_products(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, rounded)
    with caplog.at_level(logging.INFO):
        assert use_fastest_experts(layers_of(GPT_OSS), CPU, torch.bfloat16) == GROUPED
    assert "GptOssExperts has a gate of its own" in caplog.text


def test_nothing_is_tried_for_dense_models_and_other_types_and_this_machine_has_no_fused_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert use_fastest_experts(layers_of(QWEN), CPU, torch.bfloat16) == GROUPED
    assert len(caplog.messages) == 1 and "ImportError" in caplog.messages[0]
    installed(monkeypatch, broken)
    assert use_fastest_experts(layers_of(FAMILIES["qwen3"]), CPU, torch.bfloat16) is None
    assert use_fastest_experts(layers_of(QWEN), CPU, torch.float32) is None
