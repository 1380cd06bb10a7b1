"""What binds a run, by measured figures: a part that is slow has the largest share."""

import pytest

from service.cli.status_view import status_lines
from service.config import Config
from service.observe.bound_by import NOW_SECONDS, SAMPLE_SECONDS, SECONDS, STATE, STEPS, SYNCS, Totals, bound_by
from service.observe.measure import measure_states
from service.observe.merged_metrics import Hub
from service.observe.metrics import AlertThresholds, Metrics
from tests.pure.buffer.world import TurnedClock

MINUTES = 600.0


def totals(
    driver: dict[str, float],
    trajectories: dict[str, float] | None = None,
    scorers: float = 0.0,
    idle: float = 0.1,
    sync_seconds: float = 0.001,
) -> Totals:
    """Ten minutes with 200 steps; the states of the driver are fractions of them, and what is left is its wait."""
    states = {**driver, "waiting": 1 - sum(driver.values())}
    found: Totals = {(STEPS, "driver/driver", ""): 200.0, (SYNCS, "buffer/buffer", ""): 2000.0}
    found |= {(STATE, "driver/driver", state): MINUTES * share for state, share in states.items()}
    for n in range(2):
        generating = {"generating": MINUTES * (1 - idle), "waiting": MINUTES * idle, "starting": 60.0}
        found |= {(STATE, f"generator/{n}", state): seconds for state, seconds in generating.items()}
        for part, share in {"prefill": 0.1, "decode": 0.8, "environment": 0.05, **(trajectories or {})}.items():
            found[f"{SECONDS}_sum", f"generator/{n}", part] = 30 * MINUTES * share
            found[f"{SECONDS}_count", f"generator/{n}", part] = 1000.0
    buffer = {"syncing": 2000 * sync_seconds, "scorers": MINUTES * scorers}
    return found | {(STATE, "buffer/buffer", state): seconds for state, seconds in buffer.items()}


SLOW = {
    "engines": totals({"step": 0.3}),
    "trainer": totals({"step": 0.7, "bookkeeping": 0.05}),
    "environment": totals({"step": 0.3}, {"environment": 3.0, "other": 0.5}),
    "scorers": totals({"step": 0.3}, scorers=0.6),
    "journal": totals({"step": 0.2}, sync_seconds=20.0),
    "weights": totals({"step": 0.3, "weights": 0.4}, {"pause": 0.5}),
    "evaluation": totals({"step": 0.3, "evaluating": 0.6}),
    "checkpoint": totals({"step": 0.3, "checkpoint": 0.6}),
}


@pytest.mark.parametrize("part", SLOW)
def test_the_slow_part_has_the_largest_share(part: str) -> None:
    found = bound_by(SLOW[part], MINUTES)
    assert found is not None and found["part"] == part, found
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert found["idle"] == pytest.approx(0.1)


def test_a_wait_is_divided_by_the_seconds_of_the_trajectories() -> None:
    found = bound_by(totals({"step": 0.4}, {"prefill": 0.0, "decode": 0.6, "environment": 0.4}, sync_seconds=0.0), 600)
    assert found is not None
    assert found["shares"] == pytest.approx(
        {"trainer": 0.4, "engines": 0.36, "environment": 0.24, "journal": 0.0, "scorers": 0.0}
    )


def test_after_too_few_steps_nothing_is_said() -> None:
    assert bound_by({**SLOW["engines"], (STEPS, "driver/driver", ""): 2.0}, MINUTES) is None


def test_status_and_metrics_show_a_part_that_becomes_slow_within_a_minute() -> None:
    clock, thresholds = TurnedClock(), AlertThresholds.of(Config())
    hub = Hub(clock)
    driver, generator = Metrics("driver", "driver", thresholds), Metrics("generator", "generator-0", thresholds)
    buffer, spent = Metrics("buffer", "buffer", thresholds), {"waiting": 0.0, "step": 0.0, "generating": 0.0}

    def run(seconds: int, waits: float, environment: float) -> None:
        for _ in range(seconds):
            clock.now += 1.0
            spent["waiting"] += waits
            spent["step"] += 1 - waits
            spent["generating"] += 1.0
            measure_states(driver, {state: spent[state] for state in ("waiting", "step")})
            driver.count("baton_optimizer_steps_total")
            measure_states(generator, {"generating": spent["generating"]})
            for part, each in (("decode", 10.0 - environment), ("environment", environment)):
                generator.observe("baton_trajectory_seconds", each, env="search", part=part)
            for source, metrics in (
                ("driver/driver", driver),
                ("generator/generator-0", generator),
                ("buffer", buffer),
            ):
                hub.push(source, metrics.snapshot())
            hub.put_status("buffer", {"accepted_tokens": 0})

    run(5, 0.2, 1.0)
    assert hub.status()["binding"] is None
    run(595, 0.2, 1.0)
    assert hub.status()["binding"]["part"] == "trainer"
    run(int(NOW_SECONDS + SAMPLE_SECONDS), 0.9, 9.0)
    (line,) = [line for line in status_lines(hub.status()) if line.startswith("  binds")]
    assert "environment 8" in line and "of the last" in line
    assert hub.status()["binding"]["part"] == "environment"
    assert b'baton_binding_ratio{ident="metrics-hub",part="trainer",role="hub"} 0.7' in hub.page()


def test_an_actor_that_restarts_counts_from_its_beginning() -> None:
    clock, thresholds = TurnedClock(), AlertThresholds.of(Config())
    hub = Hub(clock)
    for begun in (1000.0, 0.0):
        driver = Metrics("driver", "driver", thresholds)
        for second in range(60):
            clock.now += 1.0
            measure_states(driver, {"waiting": begun, "step": begun + second})
            driver.count("baton_optimizer_steps_total")
            hub.push("driver/driver", driver.snapshot())
            hub.put_status("buffer", {"accepted_tokens": 0})
    assert hub.status()["binding"]["shares"]["trainer"] == pytest.approx(1.0)
