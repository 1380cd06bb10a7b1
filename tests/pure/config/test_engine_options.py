"""What becomes of vLLM's engine arguments that a user sets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from actors.engine.vllm_arguments import EngineSettings, engine_arguments
from service.config import Config, load
from service.config.checks import check
from service.config.engine_options import REFUSED, installed_names, refusal
from service.errors import ConfigError, UserError


def configured(*settings: str) -> Config:
    config = load(["configs/quickstart.yaml"], list(settings)).config
    check(config)
    return config


def test_an_option_reaches_the_engine_over_what_baton_would_set(tmp_path: Path) -> None:
    config = configured("generator.engine_options.max_num_batched_tokens=512", "generator.kv_cache_bytes=1048576")
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 8}'
    )
    arguments = engine_arguments(EngineSettings.of(config), tmp_path)
    assert arguments["max_num_batched_tokens"] == 512


def test_stages_of_a_pipeline_are_refused_on_a_cpu(tmp_path: Path) -> None:
    settings = EngineSettings.of(configured("generator.engine_options.pipeline_parallel_size=2"))
    with pytest.raises(UserError, match="CPU build has no pipelines"):
        engine_arguments(settings, tmp_path)


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
