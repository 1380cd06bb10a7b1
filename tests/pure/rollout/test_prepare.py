"""What a run reads and makes before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.driver.prepare import prepare
from service.config import Config, LoraConfig, load
from service.errors import UserError
from service.learn.model.adapter_folder import Base, write_adapter
from service.rollout.prompts.dataset import write_rows
from service.run.preparing.inputs import demonstrations

TINY = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def config(*settings: str) -> Config:
    return load([TINY], ["model.make.hidden_size=64", *settings]).config


def rows(path: Path, *classes: str) -> Path:
    write_rows(
        path,
        [
            {"prompt": f"question {i}", "env_class": name, "reward_spec": {"ground_truth": "1"}, "seed": i}
            for i, name in enumerate(classes)
        ],
    )
    return path


def test_a_mixture_and_the_evaluation_sets_are_prepared_like_any_other_prompts(tmp_path: Path) -> None:
    mixed, held_out = rows(tmp_path / "a.jsonl", "lookup", "lookup"), rows(tmp_path / "b.jsonl", "gsm8k")
    made = config(
        "data.make_rows=null",
        f"data.mixture={{a: {{path: {mixed}}}}}",
        f"data.eval={{other: {held_out}}}",
        "data.eval_make_rows=3",
    )
    prepared = prepare(made, tmp_path / "run")
    assert [task.uid for task in prepared.tasks] == ["a/a-0", "a/a-1"]
    assert prepared.eval_files == {"other": held_out, "made": tmp_path / "run" / "data" / "eval.jsonl"}


@pytest.mark.parametrize("setting", ["data.train", "data.eval.dev"])
def test_a_row_whose_environment_cannot_be_made_is_named_before_the_run_starts(tmp_path: Path, setting: str) -> None:
    bad = rows(tmp_path / "bad.jsonl", "lookup", "lokup")
    given = [f"{setting}={bad}"] + (["data.make_rows=null"] if setting == "data.train" else [])
    with pytest.raises(UserError, match=r"no environment 'lokup'; the nearest is 'lookup'.*first needed by row 1"):
        prepare(config(*given), tmp_path / "run")


def test_the_demonstrations_of_a_warm_start_follow_the_configured_conversation(tmp_path: Path) -> None:
    settings = ["model.warm_start.demonstrations=8"]
    prepared = prepare(config(*settings), tmp_path)

    def tokens(mode: str) -> int:
        made = config(*settings, f"generator.conversation={mode}")
        shown = demonstrations(made.model, made.env, made.generator, made.run.seed, prepared.model_folder)
        return sum(len(row.token_ids) for row in shown)

    assert tokens("inline") < tokens("append")


def test_an_adapter_for_another_model_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", Base(path="other", fingerprint="another"), LoraConfig(), {})
    made = config("model.warm_start=null", "model.lora={}", f"model.adapter={tmp_path / 'adapter'}")
    with pytest.raises(UserError, match="is of an adapter for another model than"):
        prepare(made, tmp_path / "run")
    with pytest.raises(UserError, match=r"model\.lora\.rank: the adapter .* has 16; set that"):
        prepare(config("model.warm_start=null", "model.lora.rank=8", f"model.adapter={tmp_path / 'adapter'}"), tmp_path)
