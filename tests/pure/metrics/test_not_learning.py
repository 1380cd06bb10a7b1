"""A run that does not learn: the likeliest cause is named first, and a healthy run is not blamed."""

import json
from pathlib import Path

import pytest

from service.observe.not_learning import FLAT_STEPS, SYMPTOMS, WINDOW, Diagnosis, after_warm_start
from service.observe.summary import summary_lines
from service.run.folder import SUMMARY
from service.run.records.progress import Progress
from service.run.records.writer import RunWriter
from service.types import PolicyVersion

HEALTHY = {
    "reward/avg_raw_reward": 0.4,
    "async/staleness_mean": 1.0,
    "policy/policy_lr": 1e-6,
    "policy/by_staleness/0/kl": 1e-4,
    "policy/by_staleness/1/kl": 1e-3,
    "reward/groups_all_one": 0.1,
    "policy/policy_entropy": 0.5,
    "generate/avg_response_length": 40.0,
    "generate/truncated_ratio": 0.02,
    "reward/groups_all_zero": 0.3,
    "reward/groups_without_variance": 0.4,
    "policy/policy_kl": 0.001,
    "policy/loss_metrics/clip_ratio": 0.02,
    "policy/grad_norm": 0.3,
}
UNSOLVED = {"reward/groups_all_zero": 1.0, "reward/groups_without_variance": 1.0, "policy/grad_norm": 0.0}
"""The figures of steps without any reward."""
CAUSES = {
    "learning-rate": {"policy/policy_lr": 1e-12},
    "engine-and-trainer": {"policy/by_staleness/0/kl": 0.05, "policy/policy_kl": 0.2},
    "always-solved": {"reward/groups_all_one": 1.0, "reward/groups_without_variance": 1.0, "policy/grad_norm": 0.0},
    "too-fast": {"policy/by_staleness/1/kl": 1.4, "policy/policy_kl": 1.4, "policy/policy_entropy": 0.01},
    "entropy": {"policy/policy_entropy": 0.01},
    "too-short": {"generate/avg_response_length": 1.0},
    "shorter": {"generate/avg_response_length": 6.0},
    "cut": {"generate/truncated_ratio": 0.9, **UNSOLVED},
    "never-solved": UNSOLVED,
    "no-variance": {"reward/groups_without_variance": 1.0, "policy/grad_norm": 0.0},
    "stale": {"policy/policy_kl": 0.3},
    "clipped": {"policy/loss_metrics/clip_ratio": 0.6},
    "no-gradient": {"policy/grad_norm": 0.0},
}
"""What the last steps of a run show, by the cause that is named first."""


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named_first(name: str) -> None:
    diagnosis = Diagnosis([HEALTHY] * WINDOW)
    assert diagnosis.found() == {}
    for _ in range(WINDOW):
        diagnosis.stepped(HEALTHY | CAUSES[name])
    assert next(iter(diagnosis.found())) == name


def test_every_symptom_has_a_run_that_shows_it() -> None:
    assert [*CAUSES, "flat"] == [symptom.name for symptom in SYMPTOMS]


@pytest.mark.parametrize(("gain", "flat"), [(0.0, True), (0.5, False)])
def test_a_reward_without_gain_in_hundreds_of_steps_is_named(gain: float, flat: bool) -> None:
    diagnosis = Diagnosis()
    for step in range(FLAT_STEPS):
        assert diagnosis.found() == {}
        reward = 0.4 + 0.1 * (step % 2) + gain * step / FLAT_STEPS
        diagnosis.stepped(HEALTHY | {"reward/avg_raw_reward": reward})
    assert ("flat" in diagnosis.found()) is flat
    for step in range(2 * FLAT_STEPS):  # the reward rises, and stays high
        reward = 0.4 + 0.1 * (step % 2) + gain + min(step, 100) / 100
        diagnosis.stepped(HEALTHY | {"reward/avg_raw_reward": reward})
        assert step < 100 or diagnosis.found() == {}


def test_the_cause_that_stood_longest_is_told_after_it_has_gone_also_by_a_resumed_run() -> None:
    lines = [HEALTHY] * WINDOW + [HEALTHY | CAUSES["too-fast"]] * 9 + [HEALTHY | CAUSES["cut"]] * WINDOW
    diagnosis = Diagnosis(lines)
    assert next(iter(diagnosis.found())) == "cut"
    assert diagnosis.worst().startswith("in 13 steps, from step 6 on, ") and "#too-fast" in diagnosis.worst()
    assert Diagnosis([HEALTHY] * 99).worst() == ""


def test_a_cut_that_follows_steps_that_moved_the_policy_too_far_is_not_told_as_the_cause() -> None:
    cut = HEALTHY | CAUSES["cut"]
    old = {key: value for key, value in cut.items() if "staleness/1" not in key}
    diagnosis = Diagnosis([old, *[cut | CAUSES["too-fast"]] * (WINDOW - 1)])
    assert next(iter(diagnosis.found())) == "too-fast"
    for line in [*[cut | CAUSES["too-fast"], old] * 3, *[cut] * 50]:
        diagnosis.stepped(line)
    assert next(iter(diagnosis.found())) == "cut" and "#too-fast" in diagnosis.worst()
    assert "#cut" in Diagnosis([*[cut] * 50, *[cut | CAUSES["too-fast"]] * 9]).worst()


def test_a_warm_start_that_solves_nothing_is_named() -> None:
    assert "it solves nothing" in after_warm_start(HEALTHY | UNSOLVED)
    assert after_warm_start(HEALTHY) == "after the warm start the reward is 0.4, and 0 in 30% of the groups"


def test_the_run_says_it_once_and_in_its_summary(tmp_path: Path) -> None:
    said: list[str] = []
    run = RunWriter(tmp_path)
    progress = Progress(2 * WINDOW, (), True, run, said.append, dict)
    progress.begin()
    for step in range(1, 2 * WINDOW + 1):
        progress.stepped(PolicyVersion(0, step), HEALTHY | CAUSES["cut"], {}, [])
    run.close()
    (named,) = (line for line in said if "may not learn" in line)
    assert "(docs/not-learning.md#cut)" in named and "(docs/not-learning.md#cut)" in progress.not_learning
    buffer = {"tokens": {}, "length_distance": 0.0, "token_length_distance": 0.0, "lengths": {}}
    progress.end("finished", buffer, [])
    assert f"learning: at the end {progress.not_learning}" in summary_lines(
        json.loads((tmp_path / SUMMARY).read_text())
    )
