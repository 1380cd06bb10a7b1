"""What vLLM answers for one turn, as the rollout's engine says it; also where vLLM leaves parts of it out."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pydantic
import pytest

import actors.engine.vllm_arguments
import actors.engine.vllm_engine
from actors.engine.vllm_engine import WARM_UP, VllmEngine
from service.config import Config, WeightsConfig
from service.errors import RunFailed, UserError
from service.rollout.engine import Generation, Sampling, validate_generation
from service.types import NO_VERSION, PolicyVersion

PROMPT = np.arange(3, 8, dtype=np.int32)


class Kinds(Enum):
    FINAL_ONLY = 2


class FakeVllm:
    """Gives the completion that it was made with, or raises it."""

    def __init__(self, completion: Any) -> None:
        self.completion = completion
        self.errored = False
        self.asked: list[tuple[dict[str, Any], Any]] = []

    async def generate(
        self, prompt: dict[str, Any], params: Any, request_id: str, lora_request: Any
    ) -> AsyncIterator[Any]:
        self.asked.append((prompt, params))
        if isinstance(self.completion, Exception):
            raise self.completion
        yield SimpleNamespace(outputs=[self.completion], num_cached_tokens=4, metrics=None)

    async def update_weight_version(self, version: str) -> None:
        pass


def completion(**changed: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "token_ids": [9, 8, 2],
        "logprobs": SimpleNamespace(logprobs=[-0.1, -0.2, -0.3]),
        "weight_versions": [SimpleNamespace(version="7", start=0, end=3)],
        "finish_reason": "stop",
        "stop_reason": None,
        "routed_experts": None,
    }
    return SimpleNamespace(**(values | changed))


def span(version: int, start: int, end: int) -> SimpleNamespace:
    return SimpleNamespace(version=str(version), start=start, end=end)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    for name in ("vllm", "vllm.sampling_params"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = sys.modules["vllm.sampling_params"]
    module.SamplingParams, module.RequestOutputKind = SimpleNamespace, Kinds
    module.StructuredOutputsParams = SimpleNamespace
    return VllmEngine(Config(weights=WeightsConfig(kv_cache="keep")), Path("nowhere"))


async def answered(engine: VllmEngine, **changed: Any) -> Generation:
    engine._llm = FakeVllm(completion(**changed))  # type: ignore[assignment]
    return await engine.generate(PROMPT, Sampling(max_tokens=4), "r")


def wrong(generation: Generation) -> str | None:
    return validate_generation(generation, len(PROMPT), max_tokens=4, vocab_size=10)


async def test_every_token_has_its_log_probability_and_the_version_that_sampled_it(engine: VllmEngine) -> None:
    generation = await answered(engine, weight_versions=[span(7, 0, 1), span(8, 1, 3)])
    assert generation.token_ids.tolist() == [9, 8, 2]
    assert generation.logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert generation.versions.tolist() == [7, 8, 8]
    assert (await answered(engine)).versions.tolist() == [7, 7, 7]
    gap = await answered(engine, weight_versions=[span(7, 0, 1), span(8, 2, 3)])
    assert gap.versions.tolist() == [7, NO_VERSION, 8], "a token between two spans has no version"
    assert wrong(generation) is None
    assert dict(engine.counts) == {"requests": 3, "prompt_tokens": 15, "cached_tokens": 12, "generated_tokens": 9}


@pytest.mark.parametrize(
    ("finish", "stop", "ended"),
    [("stop", None, True), ("stop", 2, True), ("stop", "</answer>", False), ("length", None, False)],
)
async def test_an_end_was_sampled_unless_a_string_or_a_limit_made_it(
    engine: VllmEngine, finish: str, stop: Any, ended: bool
) -> None:
    generation = await answered(engine, finish_reason=finish, stop_reason=stop)
    assert (generation.stop_reason, generation.sampled_end) == (finish, ended)
    ((prompt, params),) = engine._llm.asked  # type: ignore[union-attr]
    assert prompt == {"type": "token", "prompt_token_ids": PROMPT.tolist()}
    assert (params.max_tokens, params.logprobs, params.output_kind) == (4, 0, Kinds.FINAL_ONLY)


@pytest.mark.parametrize(
    ("left_out", "why"),
    [
        ({"logprobs": None}, "0 log-probabilities for 3 tokens"),
        ({"weight_versions": None}, "tokens of no policy version"),
        ({"weight_versions": [span(7, 0, 1), span(8, 2, 3)]}, "tokens of no policy version"),
        ({"finish_reason": None}, "ended for the reason None"),
    ],
)
async def test_what_vllm_leaves_out_is_said_by_the_agent_loop(
    engine: VllmEngine, left_out: dict[str, Any], why: str
) -> None:
    found = wrong(await answered(engine, **left_out))
    assert found is not None and why in found


async def test_an_error_of_vllm_is_itself_unless_the_core_died_of_it(engine: VllmEngine) -> None:
    engine._llm = llm = FakeVllm(ValueError("prompt too long"))  # type: ignore[assignment]
    with pytest.raises(ValueError, match="prompt too long"):
        await engine.generate(PROMPT, Sampling(4), "r")
    llm.errored = True
    with pytest.raises(RunFailed, match="the engine core died"):
        await engine.generate(PROMPT, Sampling(4), "r")
    assert (engine.running, dict(engine.counts)) == (0, {})


MIXTURE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "mlp_only_layers": [0],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 8,
    "head_dim": 4,
    "vocab_size": 10,
}
RECORDED = len(WARM_UP) + 3 - 1
"""Tokens of the warm-up whose experts are recorded: all but the last of three that are generated."""


async def start_on_gpu(engine: VllmEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, shape: Any) -> None:
    """Start an engine on a mixture of experts, which records experts of this shape."""
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    engine._model_folder = folder
    experts = None if shape is None else np.zeros(shape, np.int16)
    llm = FakeVllm(completion(routed_experts=experts))
    monkeypatch.setattr(actors.engine.vllm_arguments, "on_gpu", lambda: True)
    monkeypatch.setattr(actors.engine.vllm_engine, "_build", lambda arguments, with_load: (llm, None))
    await engine.start(PolicyVersion(0, 0))


async def test_settings_that_vllm_refuses_are_one_line_that_reaches_the_driver(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(arguments: Any, with_load: bool) -> None:
        pydantic.TypeAdapter(Annotated[int, pydantic.AfterValidator(four_heads_in_three)]).validate_python(4)

    def four_heads_in_three(heads: int) -> int:
        raise ValueError(f"{heads} heads in 3 parts")

    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    engine._model_folder = tmp_path
    monkeypatch.setattr(actors.engine.vllm_engine, "_build", refuse)
    with pytest.raises(UserError, match=rf"^generator: vLLM refuses the settings for {tmp_path}: 4 heads in 3 parts$"):
        await engine.start(PolicyVersion(0, 0))


@pytest.mark.parametrize("layers", [2, 3])
async def test_an_engine_whose_recorded_experts_the_trainer_can_replay_starts(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    await start_on_gpu(engine, tmp_path, monkeypatch, (RECORDED, layers, 2))
    assert engine.serving == PolicyVersion(0, 0)
    said = await engine.generate(PROMPT, Sampling(max_tokens=4), "r")
    assert said.routed_experts is not None and said.routed_experts.dtype == np.uint8, "the model has few experts"


@pytest.mark.parametrize("shape", [None, (RECORDED, 1, 2), (RECORDED, 3, 1), (RECORDED + 1, 3, 2), (3, 3, 2)])
async def test_an_engine_that_records_other_experts_than_the_trainer_replays_fails_at_its_start(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: Any
) -> None:
    with pytest.raises(RunFailed, match=r"replays 2 experts in 3 or 2 layers .*VLLM_USE_V2_MODEL_RUNNER") as failed:
        await start_on_gpu(engine, tmp_path, monkeypatch, shape)
    assert str(() if shape is None else shape) in str(failed.value)
