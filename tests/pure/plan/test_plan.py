"""`baton plan`: whether it fits, how fast it is, what binds, and which split is best."""

import json
import re
from pathlib import Path

import pytest
from msgspec import structs

from benchmarks.estimates import SHAPES
from service.cli.parser import main
from service.config import load
from service.errors import UserError
from service.learn.estimate.fit import fit
from service.learn.estimate.gpus import DATA_SHEETS, H100
from service.learn.settings import FitSettings
from service.plan.command import DOES_NOT_FIT
from service.plan.forecast import MAX_SPLITS, splits_of
from service.plan.settings import PlanSettings
from service.plan.work import OPTIONS
from service.run.folder import METRICS

QUICKSTART = str(Path(__file__).parents[3] / "configs/quickstart.yaml")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments for a small model on eight GPUs, without weights or data."""
    parent = tmp_path_factory.mktemp("plan")
    folder = parent / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["Qwen2.5-0.5B"] | {"num_hidden_layers": 2}))
    file = parent / "mine.yaml"
    file.write_text(
        f"model: {{path: {folder}}}\n"
        "env: {name: gsm8k, max_turns: 1}\n"
        "data: {make_rows: 64}\n"
        "generator: {engines: 4, concurrent_groups: 128, max_input_length: 512, max_generate_length: 512}\n"
        "trainer: {ranks: 4, mini_batch_size: 64, max_tokens_per_micro_batch: 8192, gradient_checkpointing: true}\n"
    )
    return ["--config", str(file)]


def planned(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, object]:
    assert main(["plan", *words, "--json"]) == code
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_page_says_memory_speed_binding_splits_and_every_assumption(
    recipe: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *recipe, "--gpus", "8"]) == 0
    page = capsys.readouterr().out
    for said in ("memory of a rank", "it fits", "sampled", "what binds", "weights by", "GPU-hours", "best split"):
        assert said in page, said
    assumptions = page.partition("assumptions")[2]
    assert [name for name in OPTIONS if f"{name.replace('_', ' ')} " not in assumptions] == []


def test_more_turns_and_a_slow_tool_make_the_environment_bind(
    recipe: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*recipe, "env.max_turns=8", "--turns", "8", "--response-tokens", "50", "--environment-seconds", "20"]
    slow = planned(words, capsys)
    assert slow["chosen"]["binding"]["part"] == "environment"  # type: ignore[index]
    assert slow["sources"]["turns"] == "given"  # type: ignore[index]


def test_the_best_split_is_the_fastest_that_fits(recipe: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = planned([*recipe, "--gpus", "8"], capsys)
    splits: list[dict[str, float]] = found["splits"]  # type: ignore[assignment]
    assert [(split["engines"], split["ranks"]) for split in splits] == [(n, 8 - n) for n in range(1, 8)]
    fastest = min(splits, key=lambda split: split["step_seconds"])
    assert found["best"] == {"engines": fastest["engines"], "ranks": fastest["ranks"]}
    assert found["speed_over_on_policy"] > 1  # type: ignore[operator]


def test_hours_are_those_of_the_gpus_that_the_configuration_takes(
    recipe: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    hours = []
    for gpus in ("3", "8"):
        assert main(["plan", *recipe, "generator.engines=1", "trainer.ranks=2", "--gpus", gpus]) == 0
        page = capsys.readouterr().out
        assert ("(3 GPUs; the figures above the table are for them)" in page.splitlines()[0]) == (gpus == "8")
        hours += re.findall(r"[\d.]+ GPU-hours", page)
    assert len(hours) == 2 and hours[0] == hours[1]


def test_ranks_that_share_micro_batches_stay_together() -> None:
    words = ["trainer.ranks=4", "trainer.sequence_parallel=2", "generator.tensor_parallel_size=2"]
    assert list(splits_of(PlanSettings.of(load([], words).config), 8)) == [(1, 6), (2, 4), (3, 2)]
    for gpus, more in ((3, 4), (9, 10)):
        with pytest.raises(UserError, match=rf"which does not use all of them; give {more}$"):
            list(splits_of(PlanSettings.of(load([], words).config), gpus))
    words = [
        "trainer.ranks=24",
        "trainer.sequence_parallel=3",
        "trainer.shard_within=node",
    ]
    with pytest.raises(UserError, match=r"give 25$"):
        list(splits_of(PlanSettings.of(load([], words).config), 13))


@pytest.mark.parametrize(("turns", "limit"), [(4, ("agents.max_calls", 64)), (100, ("env.max_turns", 100))])
def test_the_turns_of_an_agent_are_limited_by_the_larger_of_two_settings(turns: int, limit: tuple[str, int]) -> None:
    config = load([], ["env.name=agent", "env.command=[codex]", f"env.max_turns={turns}"]).config
    assert PlanSettings.of(config).most_turns == limit


def test_an_agent_with_more_turns_than_env_max_turns_takes_as_long_as_its_tokens(
    recipe: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*recipe, "env.name=agent", "env.command=[codex]", "agents.max_tokens=1048576", "--sigma", "0"]
    words += ["buffer.max_bytes=1099511627776", "buffer.max_group_bytes=1099511627776", "--response-tokens", "512"]
    words += ["buffer.max_journal_bytes=1099511627776"]
    four, forty = (planned([*words, "env.max_turns=4", "--turns", turns], capsys) for turns in ("4", "40"))
    assert forty["chosen"]["step_seconds"] > 8 * four["chosen"]["step_seconds"]  # type: ignore[index]


def test_an_engine_that_shares_a_rank_s_gpu_counts_there(recipe: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for size, fits in (("1073741824", True), ("80000000000", False)):
        words = [*recipe[2:], "weights.transport=ipc", f"generator.kv_cache_bytes={size}"]
        found = planned([*recipe[:2], *words], capsys, 0 if fits else DOES_NOT_FIT)
        validated = fit(FitSettings.of(load([recipe[1]], words).config), Path(recipe[1]).parent / "model", H100.memory)
        chosen: dict[str, dict[str, float]] = found["chosen"]  # type: ignore[assignment]
        assert sum(chosen["rank_bytes"].values()) == pytest.approx(validated.rank_bytes)
        assert [found["fits"], chosen["fits"]] == [fits, fits]


def test_a_mixture_of_experts_in_float32_is_refused_in_one_line(
    tmp_path: Path, recipe: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shape = SHAPES["Qwen3-30B-A3B"] | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert main(["plan", *recipe, f"model.path={tmp_path}", "model.dtype=float32"]) == 2
    said = capsys.readouterr().err
    assert "no step of a mixture of experts can be estimated in it; plan with bfloat16" in said
    assert said.count("baton: ") == 1 and "Traceback" not in said


def test_what_does_not_fit_is_an_answer_with_an_exit_code_of_its_own(
    recipe: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATA_SHEETS, "small", structs.replace(H100, memory=1e9))
    words = [*recipe, "--gpu", "small"]
    found = planned(words, capsys, DOES_NOT_FIT)
    assert not found["fits"] and "trainer." in str(found["problem"])
    assert main(["plan", *words]) == DOES_NOT_FIT
    page = capsys.readouterr().out
    assert "no split fits" in page and "best split" not in page
    found = planned([*recipe, "--gpus", "4"], capsys, DOES_NOT_FIT)
    assert "4 more than --gpus 4" in str(found["problem"])


def test_lengths_come_from_a_run(recipe: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    line = {"generate/avg_num_turns": 3.0, "generate/avg_assistant_tokens": 60.0, "generate/avg_num_tokens": 100.0}
    (tmp_path / METRICS).write_text(json.dumps(line) + "\n")
    work: dict[str, float] = planned([*recipe, "--lengths", str(tmp_path), "--sigma", "0.9"], capsys)["work"]  # type: ignore[assignment]
    assert (work["turns"], work["response_tokens"], work["observation_tokens"], work["sigma"]) == (3, 20, 20, 0.9)


def test_on_shared_gpus_fewer_engines_than_ranks_are_compared_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", QUICKSTART, "weights.transport=ipc", "trainer.ranks=4", "generator.engines=3"]
    found = planned(words, capsys)
    pairs = [(split["engines"], split["ranks"]) for split in found["splits"]]  # type: ignore[attr-defined, index]
    assert pairs == [(1, 4), (2, 4), (3, 4), (4, 4)]
    best = min(split["step_seconds"] for split in found["splits"])  # type: ignore[attr-defined, index]
    assert best <= found["chosen"]["step_seconds"]  # type: ignore[index]


@pytest.mark.parametrize("transport", ["ipc", "memory"])
def test_of_many_splits_a_few_are_compared_and_the_configured_one(
    transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engines, ranks = (37, 300) if transport == "ipc" else (37, 263)
    sizes = [f"trainer.ranks={ranks}", f"generator.engines={engines}", "generator.concurrent_groups=512"]
    sizes.append("trainer.mini_batch_size=64")
    found = planned(["--config", QUICKSTART, f"weights.transport={transport}", *sizes], capsys)
    pairs = [(split["engines"], split["ranks"]) for split in found["splits"]]  # type: ignore[attr-defined, index]
    assert (engines, ranks) in pairs and len(pairs) <= MAX_SPLITS + 2


def test_an_environment_of_days_is_planned(recipe: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = planned([*recipe, "--environment-seconds", "1e6"], capsys)
    assert found["chosen"]["step_seconds"] > 1e5  # type: ignore[index]


def test_a_model_that_the_run_would_make_is_planned_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(["--config", QUICKSTART, "--gpu", "cpu"], capsys)
    assert found["fits"] and found["device"]["cores"] >= 1  # type: ignore[index]
    assert found["weights"] == {}, "copies were measured on GPUs only"
    pace = found["device"]["pace"]  # type: ignore[index]  # of a busy machine it is many times the usual one
    assert 0 < found["chosen"]["step_seconds"] < 60 * max(1.0, pace)  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h1000"], "did you mean h100"),
        (["--gpus", "0"], "--gpus 0: give a number from 1"),
        (["--gpus", str(10**20)], f"--gpus {10**20}: give a number from 1"),
        (["--gpus", "1"], "--gpus 1: an engine takes 1"),
        (["--turns", "0"], "--turns 0 (given): give a number from 1"),
        (["--turns", "1e300"], "--turns 1e+300 (given): give a number from 1"),
        (["--response-tokens", "nan"], "--response-tokens nan (given): give a number"),
        (["--sigma", "-1"], "--sigma -1 (given): give a number from 0"),
        (["--sigma", "1e300"], "--sigma 1e+300 (given): give a number from 0"),
        (["--turns", "2"], "--turns 2: env.max_turns allows 1"),
        (["--response-tokens", "513"], "--response-tokens 513: generator.max_generate_length allows 512"),
        (["--lengths", "no-such-run"], "no-such-run"),
        (["model.path=/nowhere"], "/nowhere has no config.json"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    recipe: list[str], words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *recipe, *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and len(re.findall("^baton: ", printed.err, re.MULTILINE)) == 1 and not printed.out


ODD_METRICS = {
    "": "has no optimizer step",
    "{}": "has no generate/avg_num_turns; name a run",
    "[1]": "has no generate/avg_num_turns; name a run",
    '{"generate/avg_num_turns": "x"}': "has no generate/avg_num_turns; name a run",
    "{": "cannot be read",
    "[" * 100_000: "cannot be read",
    '{"generate/avg_num_turns": NaN, "generate/avg_assistant_tokens": 1, "generate/avg_num_tokens": 1}': "--turns nan",
    f'{{"generate/avg_num_turns": {10**400}, "generate/avg_assistant_tokens": 1, "generate/avg_num_tokens": 1}}': "inf",
    '{"generate/avg_num_turns": 2, "generate/avg_assistant_tokens": 1e300, "generate/avg_num_tokens": 1}': "e+299",
}


@pytest.mark.parametrize("line", ODD_METRICS)
def test_lengths_of_a_run_without_figures_are_refused_in_one_line(
    recipe: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str
) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / METRICS).write_text(f"{line}\n" if line else "")
    assert main(["plan", *recipe, "--lengths", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert ODD_METRICS[line] in printed.err and printed.err.count("baton: ") == 1 and not printed.out


def test_a_run_without_turns_or_tokens_is_planned_with_the_least_ones(
    recipe: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    line = {"generate/avg_num_turns": 0.0, "generate/avg_assistant_tokens": 0.0, "generate/avg_num_tokens": 0.0}
    (tmp_path / METRICS).write_text(json.dumps(line) + "\n")
    work: dict[str, float] = planned([*recipe, "--lengths", str(tmp_path)], capsys)["work"]  # type: ignore[assignment]
    assert (work["turns"], work["response_tokens"], work["observation_tokens"]) == (1, 1, 0)
