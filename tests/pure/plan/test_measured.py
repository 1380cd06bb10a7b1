"""What is measured goes into a plan: the pace of this machine, a run's environment, an update on a GPU."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from service.config import load
from service.errors import UserError
from service.plan.forecast import Plan
from service.plan.machine.costs import CPU
from service.plan.machine.device import Device, profile
from service.plan.machine.pace import message_seconds
from service.plan.planning import planned_model
from service.plan.settings import PlanSettings
from service.plan.weights import update
from service.plan.work import OPTIONS, work_of

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


def test_an_update_by_memory_takes_what_it_took_on_an_h100() -> None:
    found = update("memory", 2.82e9, profile("h100"), nodes=1, rank_gpus=1, engine_gpus=1)
    assert (found.trainer, found.pause, found.arrival) == pytest.approx((0.062, 0.20, 0.26), rel=0.05)
