"""Processes of a real run killed at once, calls that Ray loses, and Ray killed: nothing is lost, nothing is doubled."""

import json
import os
import random
import time
from collections.abc import Callable, Sequence

import psutil
import pytest

from service.run.folder import SUMMARY
from tests.chaos.real_pairs import ENDS, START_SECONDS, PairRun, Scenario, runs
from tests.sim.pairs import DELAYS, MOMENTS, VICTIMS

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]

SEED = int(os.environ.get("BATON_CHAOS_SEED", "1"))
TRIPLES = 20
THREE = ("trainer-0", "generator-0", "buffer")
LOST = {"req_failure_prob": 1, "resp_failure_prob": 1, "in_flight_failure_prob": 1}
"""Of Ray's calls of actors, in percent: the request is lost, the answer, or the connection in between."""


def test_the_pairs_have_each_victim_first_and_second_each_moment_and_each_delay() -> None:
    chosen = [scenario for run in runs() for scenario in run]
    pairs = [scenario.pair for scenario in chosen]
    assert len({(pair.first, pair.second, pair.moment) for pair in pairs}) == len(pairs) == 60
    assert {pair.first for pair in pairs} == {pair.second for pair in pairs} == {*VICTIMS}
    assert {pair.moment for pair in pairs} == {*MOMENTS} and {pair.delay for pair in pairs} == {*DELAYS}
    assert sum(scenario.stops for scenario in chosen) == 10


@pytest.mark.parametrize("scenarios", runs(), ids=lambda scenarios: str(scenarios[0].pair).replace(" ", "-"))
def test_a_run_goes_on_after_pairs_of_deaths(started: Callable[[], PairRun], scenarios: Sequence[Scenario]) -> None:
    run = started()
    run.until(lambda: any("loading the model" in line for _, line in run.told.said), START_SECONDS, "loading the model")
    run.until(lambda: run.pid(scenarios[0].pair.first), START_SECONDS, "the first victim")
    for scenario in scenarios[:-1]:
        run.heal(scenario)
    run.finish(scenarios[-1])


def test_a_run_goes_on_after_a_rank_a_generator_and_the_buffer_die_within_two_seconds(
    started: Callable[[], PairRun],
) -> None:
    run, rng = started(), random.Random(SEED)
    run.until(lambda: run.step() >= 2, START_SECONDS, "step 2")
    for number in range(TRIPLES):
        time.sleep(rng.uniform(0.0, 3.0))
        before = len(run.told.deaths)
        for victim in rng.sample(THREE, 3):
            run.strike(victim)
            time.sleep(rng.uniform(0.0, 1.0))
        goal = run.step() + 2
        run.until(lambda goal=goal: run.step() >= goal, START_SECONDS, f"healing {number}")  # type: ignore[misc]
        run.note("healed", before)
    run.finish(Scenario(ENDS[4]))


def test_calls_that_ray_loses_are_made_again_and_count_once(started: Callable[..., PairRun]) -> None:
    lost = {"CoreWorkerService.grpc_client.PushTask": {"num_failures": -1, **LOST}}
    run = started("run.max_restarts=100", RAY_testing_rpc_failure=json.dumps(lost))
    run.until(lambda: run.step() >= 20, 2 * START_SECONDS, "step 20")
    run.finish()


@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_a_run_whose_ray_is_killed_ends_and_is_resumed(started: Callable[..., PairRun], part: str) -> None:
    run = started()
    run.until(lambda: run.step() >= 5, START_SECONDS, "step 5")
    (found,) = (each for each in psutil.Process(run.process.pid).children(recursive=True) if each.name() == part)
    found.kill()
    assert run.process.wait(15) == 1, run.tail()
    reason = json.loads((run.run_folder / SUMMARY).read_text())["reason"]
    assert reason in run.tail() and f"Ray's {part} has ended" in reason
    run.resume(4)
