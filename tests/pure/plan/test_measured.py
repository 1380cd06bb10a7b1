"""What is measured goes into a plan: the pace of this machine, a run's environment, an update on a GPU."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from service.cli.parser import main
from service.config import load
from service.errors import UserError
from service.observe.recorder import TRAJECTORY, Trace
from service.plan.forecast import Plan
from service.plan.machine.costs import CPU
from service.plan.machine.device import Device, profile
from service.plan.machine.pace import message_seconds
from service.plan.planning import planned_model
from service.plan.settings import PlanSettings
from service.plan.weights import update
from service.plan.work import OPTIONS, work_of
from service.run.folder import METRICS, TIMELINE
from service.run.lengths import lengths_of_run
from service.run.timeline import TimelineFiles

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"
TWO_CORES = replace(
    profile("h100"), memory=16e9, products=1e11, bandwidth=7e10, attention=4e10, attention_backward=4e10, cores=2
)


def planned(device: Device, *settings: str) -> Plan:
    config = load([QUICKSTART], list(settings)).config
    work = work_of(PlanSettings.of(config), {}, dict.fromkeys(OPTIONS) | {"turns": 2.5, "response_tokens": 3.6})
    with planned_model(config.model, config.env, config.run.seed) as model:
        return Plan(PlanSettings.of(config), model, device, work, None)


def test_messages_between_processes_take_a_part_of_a_second_on_any_machine() -> None:
    assert CPU["message"] / 100 < message_seconds() < 1.0


def test_a_pace_that_cannot_be_measured_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(UserError, match="the pace of this machine cannot be measured: false"):
        message_seconds()


def test_a_step_takes_longer_where_work_of_processes_does_and_at_most_as_much() -> None:
    usual, slower = planned(TWO_CORES).chosen.step_seconds, planned(replace(TWO_CORES, pace=2.0)).chosen.step_seconds
    assert 1.3 * usual < slower < 2.1 * usual


def test_engines_beyond_the_cores_make_no_step_faster() -> None:
    one, three = (planned(TWO_CORES, f"generator.engines={engines}").chosen for engines in (1, 3))
    assert three.step_seconds > one.step_seconds


def run_folder(folder: Path, timeline: str | None = None) -> Path:
    """A run of three turns a trajectory; later ones were outside of the engines for 3 s, but for a slow one."""
    (folder / "config.yaml").write_text("{}")
    line = {"generate/avg_num_turns": 3.0, "generate/avg_assistant_tokens": 60.0, "generate/avg_num_tokens": 100.0}
    (folder / METRICS).write_text(json.dumps(line) + "\n")
    if timeline is not None:
        (folder / TIMELINE).mkdir()
        (folder / TIMELINE / "000001.jsonl").write_text(timeline)
        return folder
    trace = Trace("generator/generator-0")
    for began, why, environment in (
        (0.0, "sampled", 70.0),
        (40.0, "sampled", 1.0),
        (60.0, "sampled", 3.0),
        (50.0, "slow", 90.0),
    ):
        parts = {"decode": 5.0, "environment": environment, "other": 1.0}
        trace.add(TRAJECTORY, (0, int(began), 0), why, "search", "stop", began, environment + 6.0, parts, [])
    writer = TimelineFiles(folder / TIMELINE)
    writer.append(trace.take())
    writer.close()
    return folder


def test_the_time_outside_of_the_engines_comes_from_a_runs_timeline(tmp_path: Path) -> None:
    work = work_of(
        PlanSettings.of(load([QUICKSTART], []).config),
        lengths_of_run(str(run_folder(tmp_path))),
        dict.fromkeys(OPTIONS),
    )
    assert work.environment_seconds == pytest.approx(1.0)
    assert work.sources["environment_seconds"].startswith(f"{TIMELINE} of ")
    given = dict.fromkeys(OPTIONS) | {"environment_seconds": 0.25}
    assert (
        work_of(
            PlanSettings.of(load([QUICKSTART], []).config), lengths_of_run(str(tmp_path)), given
        ).environment_seconds
        == 0.25
    )


@pytest.mark.parametrize("timeline", ['["span"]\n', '{"from": 1}\n', "{\n"])
def test_a_damaged_timeline_is_refused_in_one_line(
    tmp_path: Path, timeline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path, timeline)
    assert main(["plan", "--config", str(QUICKSTART), "--lengths", str(run)]) == 2
    printed = capsys.readouterr()
    assert TIMELINE in printed.err and printed.err.count("baton: ") == 1 and not printed.out


def test_an_update_by_memory_takes_what_it_took_on_an_h100() -> None:
    found = update("memory", 2.82e9, profile("h100"), nodes=1, rank_gpus=1, engine_gpus=1)
    assert (found.trainer, found.pause, found.arrival) == pytest.approx((0.062, 0.20, 0.26), rel=0.05)
