"""What a run says while it trains, and how it says that it was stopped."""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.clock import SystemClock
from service.config import load_config
from service.observe.measure import measure_step
from service.observe.merged_metrics import Hub
from service.observe.metrics import AlertThresholds, Metrics
from service.observe.summary import FEWEST_STEPS, learning_summary, summary_lines
from service.run.folder import read_lines
from service.run.records import progress
from service.run.records.progress import QUIET_SECONDS, Progress, end_early
from service.run.records.writer import RunWriter
from service.types import PolicyVersion
from tests.pure.buffer.world import TurnedClock

BUFFER: dict[str, Any] = {"tokens": {"trained": 5}, "length_distance": 0.0, "token_length_distance": 0.0, "lengths": {}}
METRICS = {"reward/avg_raw_reward": 0.5, "async/staleness_mean": 0.5, "generate/batch_padded_seq_len": 60.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TurnedClock:
    clock = TurnedClock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def begun(
    run: RunWriter,
    said: list[str],
    *settings: str,
    taken: int = 0,
    states: Callable[[], dict[str, float]] | None = None,
) -> Progress:
    config = load_config([Path("configs/quickstart.yaml")], ["run.max_steps=1000", *settings])
    for number in range(1, taken + 1):
        run.log_step({"trainer/global_step": number, **METRICS})
    run.close()
    resumes = bool(config.trainer.checkpoint_every)
    going = Progress(config.run.max_steps, tuple(config.roles), resumes, run, said.append, states or dict)
    going.go_on_from(taken)
    going.begin()
    return going


def step(going: Progress, number: int, generators: Sequence[dict[str, Any]] = (), **more: float) -> None:
    going.stepped(PolicyVersion(1, number), METRICS | more, {}, generators)


def test_the_first_step_has_a_line_quick_ones_now_and_then_and_slow_ones_one_each(
    tmp_path: Path, clock: TurnedClock
) -> None:
    said: list[str] = []
    run = RunWriter(tmp_path)
    going = begun(run, said)
    for number in range(1, 101):
        clock.now += 0.1
        step(going, number)
    assert [line.split()[1] for line in said[1:]] == ["1/1000", "50/1000", "100/1000"]
    clock.now += QUIET_SECONDS + 1
    step(going, 101)
    assert said[-1].startswith("step  101/1000 ")
    step(going, 102)
    assert said[-1].startswith("step  101/1000 ")
    run.close()


def test_a_line_says_what_bound_the_step_and_how_long_the_run_still_takes(tmp_path: Path, clock: TurnedClock) -> None:
    said: list[str] = []
    states = {"starting": 50.0, "waiting": 0.0, "step": 0.0}
    going = begun(run := RunWriter(tmp_path), said, taken=10, states=lambda: dict(states))
    for number, (waited, trained) in enumerate([(3.0, 1.0), (1.0, 7.0)], start=11):
        states["waiting"] += waited
        states["step"] += trained
        clock.now += waited + trained
        step(going, number)
    assert going.seconds_left == pytest.approx((1000 - 12) * 6.0)
    clock.now += 60.0  # more than QUIET_SECONDS
    states["waiting"] += 60.0
    step(going, 13)
    assert said[-1].endswith("24 s a step, bound by generation (89%)  72 s, 6 h 34 min left")
    run.close()
    *_, first, second, _ = read_lines(tmp_path / "metrics.jsonl")
    assert (first["bound_by"], second["bound_by"]) == ("generation", "training")
    assert first["timing/wait_for_generation_buffer"] == 3.0
    assert second["timing/since_start"] - first["timing/since_start"] == 8.0
    assert datetime.fromisoformat(second["time"]).tzinfo is UTC
    judge = {"scored": 9, "refused": 3, "fallbacks": 0, "failures": {"raised": 6}, "last_failure": "raised: judge.py:7"}
    told = {"failing": "in the last 5 steps 12 failures", "restarts": {"buffer": 2}, "sessions_cut": 3}
    going.end("finished", BUFFER | {"scorers": {"judge": judge}}, [], told)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "failing: in the last 5 steps 12 failures" in summary_lines(summary)
    assert summary["bound_by"] == "generation" and summary["time"]["training"] == pytest.approx(8 / 72)
    lines = summary_lines(summary)
    assert any(line.startswith("bound by generation: generation 89%, training 11%") for line in lines)
    assert (
        "scorer judge: 6 failures, 3 groups refused and 0 without it of 9 scored; the last: raised: judge.py:7" in lines
    )
    assert {"restarts: buffer 2", "sessions of agents that were open and were cut: 3"} <= {*lines}
    bound = {"part": "scorers", "sentence": "scorers 90%, trainer 10% of the last 2 min"}
    assert f"bound by scorers: {bound['sentence']}" in summary_lines(summary | {"binding": bound})


def test_a_step_that_waits_for_scorers_is_bound_by_them(tmp_path: Path, clock: TurnedClock) -> None:
    said: list[str] = []
    states = {"waiting": 0.0, "scorers": 0.0, "step": 0.0}
    going = begun(run := RunWriter(tmp_path), said, states=lambda: dict(states))
    states |= {"waiting": 9.0, "scorers": 8.0, "step": 1.0}
    step(going, 1)
    assert ", bound by scorers (80%)" in said[-1]
    going.end("finished", BUFFER, [])
    run.close()
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert (line["bound_by"], line["timing/wait_for_generation_buffer"]) == ("scorers", 9.0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["bound_by"] == "scorers" and summary["trainer_wait_fraction"] == pytest.approx(0.9)


def test_the_seconds_since_the_start_go_on_where_a_run_does(tmp_path: Path, clock: TurnedClock) -> None:
    going = begun(run := RunWriter(tmp_path), [])
    clock.now += 30
    step(going, 1)
    run.close()
    resumed = Progress(9, (), True, run, [].append, dict)
    resumed.go_on_from(1)
    clock.now += 5
    step(resumed, 2)
    resumed.end("finished", BUFFER, [])
    run.close()
    assert [line["timing/since_start"] for line in read_lines(tmp_path / "metrics.jsonl")] == [30, 35]
    assert json.loads((tmp_path / "summary.json").read_text())["seconds"] == 35


@pytest.mark.parametrize("steps", [FEWEST_STEPS - 1, FEWEST_STEPS])
def test_the_gain_has_an_interval_once_there_are_enough_steps_to_tell(steps: int) -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, (200, steps))
    rising = np.linspace(0.2, 0.8, steps)
    found = [learning_summary(list(rising + each), [0.0] * steps) for each in noise]
    if steps < FEWEST_STEPS:
        assert found[0]["reward_gain_interval"] is None
        said = summary_lines({"state": "finished", "steps": steps, **found[0]})
        assert f"{steps} steps are too few to tell" in said[1]
        return
    truth = learning_summary(list(rising), [0.0] * steps)["reward_gain"]
    holds = [low <= truth <= high for low, high in (each["reward_gain_interval"] for each in found)]
    assert 0.88 <= np.mean(holds) <= 1.0, "of two hundred intervals about 95 % hold the true gain"
    assert "95% interval +0.4" in summary_lines({"state": "finished", "steps": steps, **found[0]})[1]


def test_the_seconds_of_an_update_are_in_the_line_of_one_step(tmp_path: Path, clock: TurnedClock) -> None:
    config = load_config([Path("configs/quickstart.yaml")], [])
    run, metrics = RunWriter(tmp_path), Metrics("driver", "driver", AlertThresholds.of(config))
    going = begun(run, [])
    generator = {"name": "generator-0", "pid": 1, "wait_seconds": 0.0, "elapsed_seconds": 1.0}
    for number, seconds in enumerate((None, 0.5, None, None, 0.25), start=1):  # as with weights.sync_every=3
        clock.now += 1
        going.synced(seconds)
        going.synced(None)  # as where an evaluation has waited for it already
        step(going, number, [generator])
    run.close()
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [line.get("timing/sync_weights") for line in lines] == [None, 0.5, None, None, 0.25]
    for line in lines:
        measure_step(metrics, line, 0.0)
    (hub := Hub(SystemClock())).push("driver/driver", metrics.snapshot())
    assert b'baton_weight_sync_seconds_count{ident="driver",role="driver"} 2.0\n' in hub.page()


def test_a_role_that_no_environment_names_is_said_once_after_the_first_step(tmp_path: Path, clock: TurnedClock) -> None:
    said: list[str] = []
    going = begun(run := RunWriter(tmp_path), said, "roles={verifier: {}, critic: {mode: judge}}")
    for number in (1, 2):
        clock.now += 1
        step(going, number, **{"role/main/turns": 1.0, "role/verifier/turns": 1.0})
    run.close()
    notes = [line for line in said if line.startswith("NOTE")]
    assert notes == [
        "NOTE roles.critic: no trajectory of the first mini-batch gave it a turn; turns had main, verifier"
    ]


@pytest.mark.parametrize(
    ("state", "every", "hint"), [("stopped", 20, True), ("stopped", 0, False), ("finished", 20, False)]
)
def test_a_stopped_run_says_how_it_goes_on_where_it_can(tmp_path: Path, state: str, every: int, hint: bool) -> None:
    said: list[str] = []
    begun(RunWriter(tmp_path), said, f"trainer.checkpoint_every={every}", taken=27).end(state, BUFFER, [])
    assert (f"`baton run --resume {tmp_path}` goes on from here" in said) is hint
    assert said[0] == "training: steps 28 to 1000 (0 s so far)"
    end_early(RunWriter(tmp_path), said.append, 27)
    assert said[-1] == "stopped after the 27 optimizer steps before"
