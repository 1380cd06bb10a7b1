"""What becomes of vLLM's engine arguments that a user sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.engine.vllm_arguments import EngineSettings, engine_arguments
from service.config import Config, engine_options, load
from service.config.checks import check
from service.config.engine_options import JUDGED, installed_fields
from service.errors import ConfigError, UserError


def configured(*settings: str) -> Config:
    config = load(["configs/quickstart.yaml"], list(settings)).config
    check(config)
    return config


def test_each_argument_of_the_installed_engine_is_judged_once() -> None:
    fields = [field for group in engine_options._FILE["judged"] for field in group.fields]
    assert sorted(fields) == sorted(installed_fields())


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


@pytest.mark.parametrize("name", [name for name, judged in JUDGED.items() if judged.verdict in ("owned", "refused")])
def test_an_option_that_baton_sets_or_cannot_take_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(f"generator.engine_options.{name}=1")
    assert f"generator.engine_options.{name}: " in str(refused.value) and JUDGED[name].reason in str(refused.value)


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean max_num_batched_tokens"):
        configured("generator.engine_options.max_batched_tokens=512")


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ("max_num_batched_tokens=many", "int or None"),
        ("enable_chunked_prefill=3", "bool or None"),
        ("watermark=[1]", "float"),
        ("pipeline_parallel_size=0", "at least 1"),
        ("max_num_batched_tokens=-3", "at least 1"),
        ("cudagraph_capture_sizes=8", r"list\[int\] or None"),
    ],
)
def test_a_value_of_another_type_is_refused(setting: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"must be {kind}"):
        configured(f"generator.engine_options.{setting}")


def test_a_quantised_cache_is_allowed_with_a_note() -> None:
    notes = configured("generator.engine_options.kv_cache_dtype=fp8").notes
    assert [note for note in notes if note.startswith("generator.engine_options.kv_cache_dtype: ")]
    assert not configured("generator.engine_options.max_num_batched_tokens=512").notes


def test_an_argument_of_a_newer_engine_is_passed_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_options, "installed_fields", lambda: {"new_thing": "int"})
    assert "newer" in configured("generator.engine_options.new_thing=3").notes[0]


def test_the_stages_of_a_pipeline_count_as_gpus_of_an_engine() -> None:
    wide = configured("generator.tensor_parallel_size=2", "generator.engine_options.pipeline_parallel_size=4")
    assert wide.generator.engine_gpus == 8
    with pytest.raises(ConfigError, match="8 GPUs make up an engine"):
        configured(
            "generator.tensor_parallel_size=2",
            "generator.engine_options.pipeline_parallel_size=4",
            "weights.transport=ipc",
            "generator.kv_cache_bytes=1048576",
        )
