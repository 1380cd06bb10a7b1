"""An engine's roofline: decoding waits for the memory, prefill for the products."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.estimates import SHAPES, model_folder
from service.config.rollout import GeneratorConfig
from service.errors import UserError
from service.learn.estimate.gpus import DATA_SHEETS
from service.learn.estimate.kv_cache import kv_token_bytes
from service.learn.model.hf_config import read_config
from service.plan.engine import Engine, Shape
from service.plan.machine.device import profile

H100 = profile("h100")


def shape(name: str, parent: Path) -> Shape:
    return Shape.of(read_config(model_folder(name, parent)))


@pytest.mark.parametrize(
    ("name", "billions", "of_a_token"),
    [("Qwen2.5-7B", 7.6, 7.1), ("Qwen3-4B", 4.0, 4.0), ("Qwen3-30B-A3B", 30.5, 3.0), ("Llama-3.1-8B", 8.0, 7.5)],
)
def test_the_parameters_of_a_model_are_those_of_its_card(
    name: str, billions: float, of_a_token: float, tmp_path: Path
) -> None:
    found = shape(name, tmp_path)
    assert found.parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert found.of_token / 1e9 == pytest.approx(of_a_token, rel=0.05)


@pytest.mark.parametrize("family", ["arcee", "starcoder2", "glm4_moe", "qwen3_next", "gpt_oss", "qwen2_moe", "qwen3"])
def test_the_shape_has_the_parameters_and_the_keys_of_the_family_s_own_model(family: str) -> None:
    config: Any = AutoConfig.for_model(family, num_hidden_layers=8)
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    found = Shape.of(config)
    assert found.parameters == pytest.approx(counted, rel=0.02)
    for gpus in (1, 2, 8):
        exact = kv_token_bytes(config, GeneratorConfig(tensor_parallel_size=gpus), "bfloat16")
        assert found.kv_token_bytes(gpus) == exact


def test_decoding_is_bound_by_the_memory_and_prefill_by_the_products(tmp_path: Path) -> None:
    engine = Engine(shape("Qwen3-8B", tmp_path), H100, 1, 40e9)
    weights = engine.shape.read_parameters(1) * 2 / H100.bandwidth
    assert engine.iteration(1, 0) - engine.host_seconds(1) == pytest.approx(weights)
    assert engine.iteration(8, 1024) < 1.2 * engine.iteration(1, 1024)
    products = 2 * engine.shape.of_token * 8192 / H100.products
    assert engine.prefill_seconds(8192, 0) == pytest.approx(products)


def test_two_gpus_decode_faster_than_one_but_not_twice_as_fast(tmp_path: Path) -> None:
    dense = shape("Qwen3-8B", tmp_path)
    one, two = (Engine(dense, H100, gpus, 40e9).iteration(32, 2048) for gpus in (1, 2))
    assert one / 2 < two < one


def test_few_tokens_read_few_experts_and_many_tokens_read_all(tmp_path: Path) -> None:
    model = shape("Qwen3-30B-A3B", tmp_path)
    assert model.read_parameters(1) == pytest.approx(model.of_token)
    assert model.read_parameters(1000) == pytest.approx(model.parameters - model.embedding + model.head)


def test_a_faster_gpu_is_no_slower() -> None:
    assert profile("h200").bandwidth > profile("h100").bandwidth > profile("a100").bandwidth > profile("l40s").bandwidth
    assert profile("h20").products < profile("a100").products
    assert all(profile(name).memory == DATA_SHEETS[name].memory for name in DATA_SHEETS)


@pytest.mark.parametrize(
    ("typed", "meant"), [("H100", "h100"), ("h10", "h100"), ("l40", "l40s"), ("mesured", "measured")]
)
def test_a_wrong_name_of_a_gpu_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"did you mean {meant}"):
        profile(typed)


def test_an_adapter_has_its_rank_times_both_sides_of_every_matrix(tmp_path: Path) -> None:
    sizes = SHAPES["Qwen3-4B"]
    hidden, mlp, layers = (sizes[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    queries, keys = sizes["num_attention_heads"] * 128, sizes["num_key_value_heads"] * 128
    sides = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + mlp)
    assert shape("Qwen3-4B", tmp_path).adapter_parameters(16) == pytest.approx(layers * 16 * sides)
