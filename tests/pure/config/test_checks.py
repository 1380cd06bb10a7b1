"""Combinations that would deadlock or be wrong are refused at start, with the consequence."""

from pathlib import Path

import pytest

from service.config import Config, check, check_paths, load, load_config
from service.errors import ConfigError, UserError

QUICKSTART = Path("configs/quickstart.yaml")


def test_the_shipped_configurations_pass() -> None:
    for file in sorted(Path("configs").glob("*.yaml")):
        check(load_config([file]))


@pytest.mark.parametrize(
    ("overrides", "path", "consequence"),
    [
        (["algorithm.estimator=gae"], "algorithm.estimator", "step-wise rows are separate sequences"),
        (["algorithm.estimator=reinforce++"], "algorithm.estimator", "step-wise rows are separate sequences"),
        (
            ["algorithm.estimator=gae", "algorithm.step_wise=false", "buffer.merge=off"],
            "algorithm.estimator",
            "does not train",
        ),
        (["algorithm.correction.truncate=token"], "algorithm.correction.truncate", "count twice"),
        (
            ["algorithm.correction.token_band=[2.0,0.5]"],
            "algorithm.correction.token_band",
            "every token would be masked",
        ),
        (["algorithm.kl_in_reward=true"], "algorithm.kl_in_reward", "term of the loss"),
        (["algorithm.step_wise=false"], "buffer.merge", "no steps to merge"),
        (["buffer.lookahead=4", "buffer.max_staleness=3"], "buffer.max_staleness", "masked"),
        (["buffer.lookahead=1", "weights.sync_every=3"], "buffer.lookahead", "deadlock"),
        (["generator.concurrent_groups=15"], "generator.concurrent_groups", "at least 16"),
        (["generator.engines=40"], "generator.concurrent_groups", "40 engines"),
        (["trainer.max_tokens_per_micro_batch=135"], "trainer.max_tokens_per_micro_batch", "at least 136"),
        (["algorithm.reduction=sequence_mean"], "algorithm.reduction", "counts rows"),
        (["algorithm.n_samples_per_prompt=1"], "algorithm.n_samples_per_prompt", "zero"),
        (["buffer.max_bytes=1000"], "buffer.max_bytes", "deadlock"),
        (["trainer.checkpoint_every=10", "buffer.max_journal_bytes=1000"], "buffer.max_journal_bytes", "fill"),
        (["generator.top_p=0.9"], "generator.top_p", "importance ratio"),
        (["generator.top_k=50"], "generator.top_k", "importance ratio"),
        (["generator.min_p=0.1"], "generator.min_p", "importance ratio"),
        (["generator.repetition_penalty=1.1"], "generator.repetition_penalty", "importance ratio"),
        (["generator.presence_penalty=0.5"], "generator.presence_penalty", "importance ratio"),
        (["generator.frequency_penalty=0.5"], "generator.frequency_penalty", "importance ratio"),
        (["model.path=x"], "model.path", "model.make is set too"),
        (["model.make=null"], "model.path", "no model"),
        (["data.train=x"], "data.train", "data.make_rows is set too"),
        (["data.make_rows=null"], "data.train", "no prompts"),
        (["model.make.num_kv_heads=3"], "model.make.num_kv_heads", "divide"),
        (["trainer.ranks=129"], "trainer.ranks", "never have a row"),
    ],
)
def test_a_combination_is_refused_with_its_path_and_consequence(
    overrides: list[str], path: str, consequence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(load_config([QUICKSTART], overrides))
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and consequence in message and "\n" not in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["buffer.lookahead=0"],
        ["buffer.lookahead=2", "weights.sync_every=3", "buffer.max_staleness=2"],
        ["generator.top_k=0"],
        ["algorithm.reduction=sequence_mean", "buffer.merge=off"],
        ["algorithm.step_wise=false", "buffer.merge=off"],
        ["generator.concurrent_groups=16"],
        ["trainer.max_tokens_per_micro_batch=136"],
    ],
)
def test_the_edge_of_each_bound_is_allowed(overrides: list[str]) -> None:
    check(load_config([QUICKSTART], overrides))


def test_a_refusal_names_the_file_and_line_that_set_the_value(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("buffer:\n  max_staleness: 0\n")
    loaded = load([QUICKSTART, file])
    with pytest.raises(ConfigError, match=r"mine\.yaml:2  buffer\.max_staleness: 0 is below"):
        check(loaded.config, loaded.source)


def test_a_bare_configuration_says_that_model_and_data_are_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        check(Config())
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["model.path", "data.train"]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model folder .*nowhere does not exist"):
        check_paths(load_config([], [f"model.path={tmp_path / 'nowhere'}"]))
    with pytest.raises(UserError, match=r"has no config\.json"):
        check_paths(load_config([], [f"model.path={tmp_path}"]))
    with pytest.raises(UserError, match=r"dataset .*rows\.jsonl does not exist"):
        check_paths(load_config([], [f"data.train={tmp_path / 'rows.jsonl'}"]))


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl"])
def test_outcome_estimators_pass_with_step_wise_rows(estimator: str) -> None:
    check(load_config([QUICKSTART], [f"algorithm.estimator={estimator}"]))


def test_reinforce_plus_plus_passes_where_a_trajectory_is_one_sequence() -> None:
    overrides = ["algorithm.estimator=reinforce++", "algorithm.step_wise=false", "buffer.merge=off"]
    check(load_config([QUICKSTART], overrides))


def test_truncation_passes_with_a_proximal_anchor() -> None:
    check(load_config([QUICKSTART], ["algorithm.anchor=proximal", "algorithm.correction.truncate=sequence"]))


def test_a_tracker_that_is_not_installed_is_named_before_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.config.checks.find_spec", lambda name: None)
    check_paths(load_config([QUICKSTART]))
    with pytest.raises(UserError, match=r"metrics\.wandb: the package wandb is not installed"):
        check_paths(load_config([QUICKSTART], ["metrics.wandb={}"]))
