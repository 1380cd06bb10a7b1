"""Engines of families with several kinds of layers sample what transformers computes, also over updates."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoConfig, PreTrainedModel

from service.config import LoraConfig, ModelConfig, WeightsConfig
from service.learn.learner import Learner
from service.learn.model.adapter_folder import merge
from service.rollout.engine import Generation, Sampling
from service.types import PolicyVersion
from tests.e2e.test_engine import ATOL, CONFIG, difference, logprobs, serving, update, weights_of
from tests.families.engine import of_kind, small_model
from tests.pure.learn.builders import CPU, made_rows, mini_batch, settings

pytestmark = [pytest.mark.slow, pytest.mark.full]

FEW = CONFIG.model_copy(update={"generator": CONFIG.generator.model_copy(update={"concurrent_groups": 1})})
TURN = Sampling(max_tokens=60)


def prompt(seed: int, length: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 500, length).astype(np.int32)


def off(expected: np.ndarray, generation: Generation) -> float:
    """Mean nats between what is expected of the last tokens and what the engine said."""
    assert generation.logprobs is not None
    return float(np.abs(expected - generation.logprobs[-len(expected) :]).mean())


def hybrid(seed: int) -> PreTrainedModel:
    return small_model("qwen3_5", seed)


@pytest.fixture(scope="module", params=["recompute", "keep"])
def engine(request: pytest.FixtureRequest, local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Qwen3.5: three layers of linear attention, one of full attention."""
    config = FEW.model_copy(
        update={"model": ModelConfig(dtype="bfloat16"), "weights": WeightsConfig(kv_cache=request.param)}
    )
    with serving(tmp_path_factory.mktemp("hybrid"), hybrid(0), config) as engine:
        yield engine, request.param


def test_linear_attention_is_off_by_no_more_than_twice_the_rounding_of_bfloat16(engine: Any) -> None:
    ray.get(update(engine[0], 0, weights_of(hybrid(0))))
    prompts = [prompt(seed, 20 + 9 * seed) for seed in range(5)]
    turns = ray.get([engine[0].generate.remote(p, TURN, f"r{n}") for n, p in enumerate(prompts)])
    exact = [logprobs(hybrid(0), p, turn.token_ids, 1.0) for p, turn in zip(prompts, turns, strict=True)]
    rounded = [logprobs(hybrid(0).bfloat16(), p, turn.token_ids, 1.0) for p, turn in zip(prompts, turns, strict=True)]
    rounding = float(np.abs(np.concatenate(exact) - np.concatenate(rounded)).mean())
    assert np.mean([off(of_turn, turn) for of_turn, turn in zip(exact, turns, strict=True)]) < 2 * rounding


def test_at_an_update_the_state_of_a_running_request_is_recomputed_or_kept_as_configured(engine: Any) -> None:
    engine, kv_cache = engine
    ray.get(update(engine, 10, weights_of(hybrid(0))))
    for attempt in range(11, 51):  # until the update comes amid the request
        request = engine.generate.remote(prompt(0), Sampling(max_tokens=200), "r")
        time.sleep(0.05 * (attempt - 10))
        old, new = (hybrid(0), hybrid(1)) if attempt % 2 else (hybrid(1), hybrid(0))
        ray.get(update(engine, attempt, weights_of(new)))
        generation = ray.get(request)
        before = int((generation.versions == PolicyVersion(1, attempt - 1).pack()).sum())
        if 20 < before < len(generation.versions) - 20:
            break
    else:
        pytest.fail("no update came amid a request")
    token_ids = torch.from_numpy(np.concatenate([prompt(0), generation.token_ids]).astype(np.int64))[None]
    first = len(prompt(0)) + before - 1  # the last token that the old weights sampled is read by the new ones
    with torch.no_grad():
        state = old(token_ids[:, :first], use_cache=True).past_key_values
        logits = new(token_ids[:, first:-1], past_key_values=state, use_cache=True).logits[0]
    kept = logits.log_softmax(-1).gather(1, token_ids[0, first + 1 :, None])[:, 0].numpy()
    recomputed = logprobs(new, prompt(0), generation.token_ids, 1.0)[before:]
    is_far, is_near = off(recomputed, generation), off(kept, generation)
    if kv_cache == "recompute":
        is_far, is_near = is_near, is_far
    assert is_near < 0.03 and is_far > 2 * is_near, (is_near, is_far)


@pytest.mark.parametrize("family", ["gemma3", "gemma3 multimodal", "glm4_moe", "gpt_oss", "olmo3", "smollm3"])
def test_windows_sinks_and_layers_without_rope_are_sampled_as_computed_and_of_a_multimodal_folder_the_language_model(
    local_ray: None, tmp_path: Path, family: str
) -> None:
    name, *multimodal = family.split()
    models = [small_model(name, seed, multimodal=bool(multimodal)) for seed in (0, 1)]
    models[1].save_pretrained(tmp_path / "new")
    new = Learner(settings(), tmp_path / "new", CPU, 0, 1).policy.weights()
    with serving(tmp_path / "base", models[0], FEW) as engine:
        for step, model in enumerate(models):
            if step:
                ray.get(update(engine, step, new))
            turns = ray.get([engine.generate.remote(prompt(seed), TURN, f"r{seed}") for seed in range(5)])
            assert max(difference(model, prompt(seed), turn, 1.0) for seed, turn in enumerate(turns)) < ATOL


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, targets=("q_proj", "down_proj"))])
def test_of_a_multimodal_folder_the_engine_takes_the_weights_or_the_adapter_of_the_trainer(
    local_ray: None, tmp_path: Path, lora: LoraConfig | None
) -> None:
    config = FEW.model_copy(update={"model": ModelConfig(dtype="float32", lora=lora)})
    with serving(tmp_path / "base", small_model("gemma3", 0, multimodal=True), config) as engine:
        learner = Learner(settings(trainer={"lr": 0.05}, lora=lora), tmp_path / "base", CPU, 0, 1)
        assert learner.step(mini_batch([[made_rows(4, seed=61)]], trajectories=4)).applied
        ray.get(update(engine, 1, learner.policy.weights()))
        turn = ray.get(engine.generate.remote(prompt(0), TURN, "r"))
    learner.policy.export(tmp_path / "exported")
    if lora is not None:
        merge(tmp_path / "exported", tmp_path / "base", tmp_path / "merged")
    trained, base = (
        of_kind(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (tmp_path / ("exported" if lora is None else "merged"), tmp_path / "base")
    )
    assert difference(trained, prompt(0), turn, 1.0) < 1e-3 < difference(base, prompt(0), turn, 1.0)
