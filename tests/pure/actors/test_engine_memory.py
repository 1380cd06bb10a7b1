"""What an engine is started with; one that cannot fit, or would train wrongly, is refused with what to change."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from transformers import AutoConfig

from actors.engine import vllm_arguments as arguments_module
from actors.engine.vllm_arguments import GPU_BATCHED_TOKENS, EngineSettings, engine_arguments
from service.config import Config, check, load_config
from service.config.engine_options import REFUSED, installed_names, refusal
from service.errors import ConfigError, UserError
from tests.families.small import small_config

FP8 = ["generator.quantization=fp8", "algorithm.correction.token_band=[0.5,2.0]"]


def arguments_of(model: Path, *settings: str) -> dict[str, Any]:
    """The arguments of an engine of the quick start with these settings."""
    return engine_arguments(EngineSettings.of(load_config(["configs/quickstart.yaml"], settings)), model)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments_module, "on_gpu", lambda: True)


def test_a_cache_beyond_the_free_memory_names_the_settings_that_make_it_smaller(
    made_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker of an engine has a cache of this size."""
    with pytest.raises(UserError, match=r"MiB are free: lower generator\.max_input_length"):
        arguments_of(made_model, f"generator.kv_cache_bytes={1 << 49}")
    free = psutil.virtual_memory().available
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    fits_once = f"generator.kv_cache_bytes={free - (3 << 30)}"
    arguments_of(made_model, fits_once)
    with pytest.raises(UserError, match="MiB are free"):
        arguments_of(made_model, fits_once, "generator.tensor_parallel_size=2")


def test_an_engine_reads_the_files_of_the_trainer_and_computes_its_logits_in_float32_as_it_does(
    made_model: Path,
) -> None:
    arguments = arguments_of(made_model, "model.dtype=bfloat16")
    assert arguments["hf_overrides"] == {"head_dtype": "float32"}
    assert arguments["config_format"] == arguments["load_format"] == "hf", "not Mistral's own files beside them"


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("groups", [1, 1000])
def test_a_step_of_a_gpu_engine_has_room_for_prompts_beside_all_that_decodes(made_model: Path, groups: int) -> None:
    arguments = arguments_of(made_model, f"generator.concurrent_groups={groups}")
    assert arguments["max_num_batched_tokens"] >= max(GPU_BATCHED_TOKENS, 4 * arguments["max_num_seqs"])
    assert GPU_BATCHED_TOKENS >= 8192


def test_linear_attention_in_float32_is_refused_on_cpu_and_of_a_multimodal_folder_only_the_language_model_is_served(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    text = small_config("qwen3_5").to_dict()
    AutoConfig.for_model("qwen3_5", text_config=text).save_pretrained(tmp_path)
    linear = [f"model.path={tmp_path}", "model.make=null", "model.warm_start=null"]
    with pytest.raises(UserError, match=r"model\.dtype: on CPU .* in bfloat16, not in float32"):
        arguments_of(tmp_path, *linear)
    request.getfixturevalue("as_on_gpu")
    assert arguments_of(tmp_path, *linear)["language_model_only"] is True


def test_quantized_weights_are_for_gpu_engines_and_refused_elsewhere(
    made_model: Path, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(UserError, match=r"generator\.quantization: fp8 needs engines on GPUs"):
        arguments_of(made_model, *FP8)
    request.getfixturevalue("as_on_gpu")
    assert arguments_of(made_model, *FP8)["quantization"] == "fp8"
    assert "quantization" not in arguments_of(made_model)


def test_an_engine_has_one_slot_for_an_adapter_as_large_as_the_policys(
    made_model: Path, request: pytest.FixtureRequest
) -> None:
    lora = ["model.lora.rank=12", "model.lora.targets=[q_proj,v_proj]"]
    arguments = arguments_of(made_model, *lora)
    assert (arguments["enable_lora"], arguments["max_loras"], arguments["max_lora_rank"]) == (True, 1, 16)
    assert arguments["lora_target_modules"] == ["q_proj", "v_proj"]
    assert "enable_lora" not in arguments_of(made_model)
    request.getfixturevalue("as_on_gpu")
    with pytest.raises(UserError, match=r"model\.dtype: .*float32.* use bfloat16"):
        arguments_of(made_model, *lora, "model.dtype=float32")
    assert arguments_of(made_model, *lora, "model.dtype=bfloat16", *FP8)["quantization"] == "fp8"


def test_adapters_of_a_mixture_of_experts_are_for_gpu_engines(
    made_model: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(arguments_module, "has_experts", lambda folder: True)
    attention = ["model.lora.targets=[q_proj]", "model.dtype=bfloat16"]
    with pytest.raises(UserError, match=r"model\.lora: .*experts.* GPU"):
        arguments_of(made_model, *attention)
    request.getfixturevalue("as_on_gpu")
    for records in (True, False):
        arguments = arguments_of(made_model, *attention, f"generator.record_experts={str(records).lower()}")
        assert arguments["enable_lora"] and arguments["enable_return_routed_experts"] is records


def configured(*settings: str) -> Config:
    """The quick start with these settings, checked."""
    config = load_config(["configs/quickstart.yaml"], settings)
    check(config)
    return config


def test_an_option_of_vllm_reaches_the_engine_over_what_baton_would_set(made_model: Path) -> None:
    arguments = arguments_of(made_model, "generator.engine_options.max_num_batched_tokens=512")
    assert arguments["max_num_batched_tokens"] == 512


def test_an_engine_of_several_gpus_has_processes_of_its_own_and_no_pipeline_on_a_cpu(
    made_model: Path, request: pytest.FixtureRequest
) -> None:
    """Inside a placement group vLLM would ask Ray for them."""
    two_stages = "generator.engine_options.pipeline_parallel_size=2"
    with pytest.raises(UserError, match="CPU build has no pipelines"):
        arguments_of(made_model, two_stages)
    request.getfixturevalue("as_on_gpu")
    for several in (two_stages, "generator.tensor_parallel_size=2"):
        assert arguments_of(made_model, several)["distributed_executor_backend"] == "mp"
    assert "distributed_executor_backend" not in arguments_of(made_model)


@pytest.mark.parametrize("name", ["top_p", "speculative_config", "model", "cpu_offload_gb", "kv_transfer_config"])
def test_an_option_with_which_a_run_would_train_wrongly_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"generator\.engine_options\.{name}: {refusal(name)}"):
        configured(f"generator.engine_options.{name}=1")


def test_every_pattern_of_a_refused_name_is_that_of_an_argument_of_the_installed_engine() -> None:
    _sampling, *others = REFUSED.values()
    for pattern in " ".join(others).split():
        assert any(re.fullmatch(pattern, name) for name in installed_names()), pattern


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("max_batched_tokens=512", "did you mean max_num_batched_tokens"),
        ("pipeline_parallel_size=0", "must be a whole number from 1 on"),
    ],
)
def test_an_unknown_option_and_no_stage_are_refused(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configured(f"generator.engine_options.{setting}")


def test_the_stages_of_a_pipeline_count_as_gpus_of_an_engine() -> None:
    wide = ["generator.tensor_parallel_size=2", "generator.engine_options.pipeline_parallel_size=4"]
    assert configured(*wide).generator.engine_gpus == 8
    with pytest.raises(ConfigError, match="8 GPUs make up an engine"):
        configured(*wide, "weights.transport=ipc", "generator.kv_cache_bytes=1048576")
