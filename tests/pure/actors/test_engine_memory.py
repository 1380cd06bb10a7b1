"""What an engine is started with; one that cannot fit is refused before, with what to change."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from actors.driver.prepare import prepare
from actors.engine import vllm_arguments as arguments_module
from actors.engine.vllm_arguments import GPU_BATCHED_TOKENS, EngineSettings, engine_arguments
from service.config import load_config
from service.errors import UserError
from tests.families.small import small_config

QUICKSTART = "configs/quickstart.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(load_config([QUICKSTART]), tmp_path_factory.mktemp("made")).model_folder


def test_a_cache_beyond_the_free_memory_names_the_settings_that_make_it_smaller(model: Path) -> None:
    huge = load_config([QUICKSTART], [f"generator.kv_cache_bytes={1 << 49}"])
    with pytest.raises(UserError, match=r"MiB are free: lower generator\.max_input_length"):
        engine_arguments(EngineSettings.of(huge), model)


def test_an_engine_reads_the_files_of_the_trainer_and_computes_its_logits_in_float32_as_it_does(model: Path) -> None:
    bf16 = load_config([QUICKSTART], ["model.dtype=bfloat16"])
    arguments = engine_arguments(EngineSettings.of(bf16), model)
    assert arguments["hf_overrides"] == {"head_dtype": "float32"}
    assert arguments["config_format"] == arguments["load_format"] == "hf", "not Mistral's own files beside them"


@pytest.mark.parametrize("groups", [1, 1000])
def test_a_step_of_a_gpu_engine_has_room_for_prompts_beside_all_that_decodes(
    model: Path, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    monkeypatch.setattr(arguments_module, "on_gpu", lambda: True)
    arguments = engine_arguments(
        EngineSettings.of(load_config([QUICKSTART], [f"generator.concurrent_groups={groups}"])), model
    )
    assert arguments["max_num_batched_tokens"] >= max(GPU_BATCHED_TOKENS, 4 * arguments["max_num_seqs"])
    assert GPU_BATCHED_TOKENS >= 8192


def test_linear_attention_in_float32_is_refused_on_cpu_and_of_a_multimodal_folder_only_the_language_model_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_config("qwen3_5")
    AutoConfig.for_model("qwen3_5", text_config=model.to_dict()).save_pretrained(tmp_path)
    linear = load_config([QUICKSTART], [f"model.path={tmp_path}", "model.make=null", "model.warm_start=null"])
    with pytest.raises(UserError, match=r"model\.dtype: on CPU .* in bfloat16, not in float32"):
        engine_arguments(EngineSettings.of(linear), tmp_path)
    monkeypatch.setattr(arguments_module, "on_gpu", lambda: True)
    assert engine_arguments(EngineSettings.of(linear), tmp_path)["language_model_only"] is True


def test_quantized_weights_are_for_gpu_engines_and_refused_elsewhere(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8 = load_config([QUICKSTART], ["generator.quantization=fp8", "algorithm.correction.token_band=[0.5,2.0]"])
    with pytest.raises(UserError, match=r"generator\.quantization: fp8 needs engines on GPUs"):
        engine_arguments(EngineSettings.of(fp8), model)
    monkeypatch.setattr(arguments_module, "on_gpu", lambda: True)
    assert engine_arguments(EngineSettings.of(fp8), model)["quantization"] == "fp8"
    assert "quantization" not in engine_arguments(EngineSettings.of(load_config([QUICKSTART])), model)


def test_an_engine_has_one_slot_for_an_adapter_as_large_as_the_policys(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = ["model.lora.rank=12", "model.lora.targets=[q_proj,v_proj]"]
    arguments = engine_arguments(EngineSettings.of(load_config([QUICKSTART], lora)), model)
    assert (arguments["enable_lora"], arguments["max_loras"], arguments["max_lora_rank"]) == (True, 1, 16)
    assert arguments["lora_target_modules"] == ["q_proj", "v_proj"]
    assert "enable_lora" not in engine_arguments(EngineSettings.of(load_config([QUICKSTART])), model)
    monkeypatch.setattr(arguments_module, "on_gpu", lambda: True)
    with pytest.raises(UserError, match=r"model\.dtype: .*float32.* use bfloat16"):
        engine_arguments(EngineSettings.of(load_config([QUICKSTART], [*lora, "model.dtype=float32"])), model)
    fp8 = ["model.dtype=bfloat16", "generator.quantization=fp8", "algorithm.correction.token_band=[0.5,2.0]"]
    assert engine_arguments(EngineSettings.of(load_config([QUICKSTART], [*lora, *fp8])), model)["quantization"] == "fp8"


def test_adapters_of_a_mixture_of_experts_are_for_gpu_engines(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments_module, "has_experts", lambda folder: True)
    attention = load_config([QUICKSTART], ["model.lora.targets=[q_proj]", "model.dtype=bfloat16"])
    with pytest.raises(UserError, match=r"model\.lora: .*experts.* GPU"):
        engine_arguments(EngineSettings.of(attention), model)
    monkeypatch.setattr(arguments_module, "on_gpu", lambda: True)
    for records in (True, False):
        settings = [f"generator.record_experts={str(records).lower()}"]
        config = load_config([QUICKSTART], ["model.lora.targets=[q_proj]", "model.dtype=bfloat16", *settings])
        arguments = engine_arguments(EngineSettings.of(config), model)
        assert arguments["enable_lora"] and arguments["enable_return_routed_experts"] is records
