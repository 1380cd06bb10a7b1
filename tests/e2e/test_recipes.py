"""The small recipes as a user runs them, with real vLLM, Ray and FSDP: a few optimizer steps each."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.rollout.chat.tokenizer import load_tokenizer
from service.run.folder import read_lines
from tests.e2e.conftest import ROOT, Drive
from tests.waiting import ran

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1000)]

STEPS = 4
SHORT = [f"run.max_steps={STEPS}", "model.warm_start.steps=60", "metrics.port=0"]
SHORT += ["weights.verify=true", "data.eval_every=2", "data.eval_make_rows=8", "run.trajectories_per_step=8"]
SHORT += ["trainer.checkpoint_every=2", "data.eval_samples=4"]
GREEDY = ["data.eval_temperature=0", "data.eval_make_rows=64", "trainer.lr=0.003"]
ADAPTER = [*GREEDY, "model.lora.rank=4", "trainer.lr=0.05"]
WIDE = "generator.tensor_parallel_size=2"
SPARSE = ["weights.sync_every=2"]
TRUNCATED = ["generator.top_p=0.9", "generator.top_k=20", "generator.min_p=0.05"]
SHARED_ROWS = ["trainer.sequence_parallel=2"]


@pytest.mark.parametrize(
    ("recipe", "settings", "told"),
    [
        ("gsm8k_tiny", GREEDY, None),
        ("gsm8k_tiny", ADAPTER, None),
        ("search_r1_tiny", [], "<information> 1 :"),
        ("search_r1_tiny", SHARED_ROWS, "<information> 1 :"),
        ("text_to_sql_tiny", SPARSE, "<observation>"),
        ("solver_verifier_tiny", TRUNCATED, None),
        ("compaction_tiny", [], None),
    ],
)
def test_a_small_recipe_runs(drive: Drive, recipe: str, settings: list[str], told: str | None) -> None:
    run = drive([*SHORT, *settings], recipe)
    run.finish()
    lines, summary = run.lines(), run.summary()
    assert [line["trainer/global_step"] for line in lines] == [*range(1, STEPS + 1)]
    for line in lines:
        assert 0 <= line["reward/avg_raw_reward"] <= 1
        assert np.isfinite([line["policy/policy_loss"], line["policy/grad_norm"]]).all()
        assert line["generate/num_seq_after_merge"] >= 16 * 8
    assert summary["state"] == "finished" and summary["tokens"]["trained"] > 0 and summary["tokens"]["open"] == 0
    kept = list(read_lines(run.folder / "trajectories.jsonl"))
    assert {record["stop_reason"] for record in kept} <= {"stop", "truncated", "length", "max_turns"}
    if told is not None:
        assert any(told in text for text in prompts(run.folder, kept))
        assert all(line["generate/num_seq_before_merge"] > line["generate/num_seq_after_merge"] for line in lines)
    assert_evaluated_every_second_step(run.folder, lines)
    if settings == SPARSE:
        assert_sampled_by_every_second_version(kept)
    if settings in (GREEDY, ADAPTER):
        assert_the_checkpoint_is_as_good_as_the_run_found(run.folder)


def prompts(folder: Path, kept: list[dict[str, Any]]) -> list[str]:
    """What the policy read, turn by turn."""
    tokenizer = load_tokenizer(folder / "model")
    return [tokenizer.decode(step["prompt_ids"]) for record in kept for step in record["steps"]]


def assert_sampled_by_every_second_version(kept: list[dict[str, Any]]) -> None:
    runs = [run for record in kept for step in record["steps"] for run in step["versions"]]
    steps = {int(version.split(":")[1]) for _, version in runs if version is not None}
    assert {0, 2} <= steps <= {0, 2, 4}, "the weights of other steps were never sent to the engines"


def assert_evaluated_every_second_step(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Before the first step too; each prompt with all its samples, and the numbers in the next line to be written."""
    evaluations = list(read_lines(folder / "evaluations.jsonl"))
    assert [(found["step"], found["set"]) for found in evaluations] == [(0, "made"), (2, "made"), (4, "made")]
    for found in evaluations:
        assert (found["trajectories"], found["lost_trajectories"]) == (4 * found["prompts"], 0)
        assert 0 <= found["pass_at_1"] <= found["pass_at_2"] <= found["pass_at_4"] <= 1
    scores = {
        line["trainer/global_step"]: (line["eval/step"], line["eval/made/avg_score"])
        for line in lines
        if "eval/step" in line
    }
    of_step = {found["step"]: (found["step"], found["avg_score"]) for found in evaluations}
    assert scores == {1: of_step[0], 2: of_step[2], 4: of_step[4]}


def assert_the_checkpoint_is_as_good_as_the_run_found(folder: Path) -> None:
    """`baton eval` on a checkpoint, by the likeliest tokens and with an engine of two workers, comes to what the run
    measured after that step.

    An adapter is merged for it, whereas the run's engines hold it beside the base.
    """
    output = folder / "result.json"
    words = ["-m", "service", "eval", folder / "checkpoints" / "step_2", "--output", output, WIDE]
    said = ran(sys.executable, *words, folder=ROOT, seconds=300)
    assert said.returncode == 0, said.stdout + said.stderr
    (found,) = json.loads(output.read_text())["sets"]
    before, measured, *_ = read_lines(folder / "evaluations.jsonl")
    assert found == {name: value for name, value in measured.items() if name != "step"}
    assert found["avg_tokens"] != before["avg_tokens"], "the policy had learned something by then"
    assert said.stdout.splitlines()[-2].split()[:4] == ["set", "prompts", "trajectories", "score"]
