"""What binds a run, by measured figures: injected slowness is named, and a healthy run is not blamed."""

from __future__ import annotations

import pytest

from service.cli.status_view import status_lines
from service.config import Config
from service.observe.alert_thresholds import AlertThresholds
from service.observe.hub import Hub
from service.observe.measure import measure_states
from service.observe.metrics import Metrics
from service.observe.status import run_report
from service.plan.binding import Part
from service.plan.live_binding import NOW_SECONDS, SAMPLE_SECONDS, WINDOW_SECONDS, Figures, Limits, Window, live
from tests.pure.buffer.world import TurnedClock

MINUTES = 600.0
STEPS = 200.0
LIMITS = Limits(ranks=2, lookahead=4, concurrency=3)


def figures(
    trainer: dict[str, float] | None = None,
    engine: dict[str, float] | None = None,
    trajectories: dict[str, float] | None = None,
    tokens: tuple[float, ...] = (100_000.0, 101_000.0),
    ranks: tuple[float, ...] = (300.0, 301.0),
    syncing: float = 0.04,
    sync_seconds: float = 0.002,
    arriving: float = 0.1,
) -> Figures:
    """Ten minutes of two engines and two ranks; what is given are fractions of them. Without anything the run is in
    balance."""
    driver = {"step": 0.9, "commit": 0.01, "weights": 0.03, "bookkeeping": 0.01, "checkpoint": 0.01, **(trainer or {})}
    driver["waiting"] = max(0.0, 1 - sum(driver.values()))
    states = {"generating": 0.9, "paused": 0.02, "environment": 0.02, **(engine or {})}
    states["waiting"] = max(0.0, 1 - sum(states.values()))
    spent = {"queue": 0.02, "prefill": 0.1, "decode": 0.75, "pause": 0.02, "environment": 0.08, "other": 0.03}
    spent |= trajectories or {}
    in_seconds = {state: MINUTES * share for state, share in states.items()}
    return Figures(
        MINUTES,
        STEPS,
        {state: MINUTES * share for state, share in driver.items()},
        {f"generator-{n}": in_seconds for n in range(len(tokens))},
        {f"trainer-{n}": {"forward_backward": seconds} for n, seconds in enumerate(ranks)},
        {part: 64 * MINUTES * share for part, share in spent.items()},
        {f"generator-{n}": sampled for n, sampled in enumerate(tokens)},
        STEPS * 128,
        MINUTES * syncing,
        MINUTES * syncing / sync_seconds,
        MINUTES * arriving,
    )


SLOW = {
    "a tool that sleeps": (Part.ENVIRONMENT, figures({"step": 0.3}, {}, {"environment": 4.0})),
    "a tool that sleeps while no request is left": (
        Part.ENVIRONMENT,
        figures({"step": 0.2}, {"generating": 0.3, "environment": 0.6}, {"environment": 2.0}),
    ),
    "agents that work long between calls": (Part.ENVIRONMENT, figures({"step": 0.4}, {}, {"other": 3.0})),
    "a slow disk, for which generators wait": (Part.JOURNAL, figures({"step": 0.2}, syncing=0.85, sync_seconds=0.5)),
    "a slow disk, for which the trainer waits": (
        Part.JOURNAL,
        figures({"step": 0.2, "commit": 0.7}, {"generating": 0.3}, syncing=0.4, sync_seconds=0.2),
    ),
    "too few engines": (Part.ENGINES, figures({"step": 0.4}, {"generating": 0.95})),
    "a slow engine": (
        Part.ENGINES,
        figures({"step": 0.5}, {"generating": 0.95}, tokens=(40_000.0, 100_000.0, 99_000.0)),
    ),
    "a slow rank": (Part.TRAINER, figures({}, {"generating": 0.4}, ranks=(520.0, 250.0))),
    "weights that stop the trainer": (Part.WEIGHTS, figures({"step": 0.3, "weights": 0.6}, {"generating": 0.3})),
    "weights that pause engines": (
        Part.WEIGHTS,
        figures({"step": 0.3}, {"generating": 0.3, "paused": 0.6}, {"pause": 2.0}),
    ),
    "weights that arrive late": (Part.WEIGHTS, figures({"step": 0.3}, {"generating": 0.5}, arriving=1.8)),
    "a slow engine, whose groups all wait for": (
        Part.ENGINES,
        figures({"step": 0.5}, {"generating": 0.55}, tokens=(10_000.0, 100_000.0)),
    ),
    "long evaluations": (
        Part.EVALUATION,
        figures({"step": 0.3, "evaluating": 0.6}, {"generating": 0.3, "evaluating": 0.6}),
    ),
    "large checkpoints": (Part.CHECKPOINT, figures({"step": 0.3, "checkpoint": 0.6}, {"generating": 0.4})),
}
"""What was made slow -> what binds then."""

HEALTHY = [
    figures(),
    figures({"step": 0.8}),
    figures({"step": 0.85}, {"generating": 0.8}),
    figures({}, {"generating": 0.85}, {"environment": 0.2}),
    figures({"step": 0.7, "evaluating": 0.1}),
    figures({"step": 0.5}, {"generating": 0.96}),
    figures({"step": 0.5}, {"generating": 0.96}, {"environment": 0.4}),
    figures({}, {"generating": 0.5}),
    figures({}, {"generating": 0.4}, {"environment": 0.4}, syncing=0.1),
    figures({"step": 0.6}, {"generating": 0.9}, syncing=0.15),
    figures({"step": 0.6}, {"generating": 0.9}, syncing=0.7, sync_seconds=0.03),
    figures({"step": 0.6}, {"generating": 0.9}, arriving=1.8),
]
"""Runs that spend their time on engines and trainer."""


@pytest.mark.parametrize("what", SLOW)
def test_what_was_made_slow_is_named(what: str) -> None:
    part, grown = SLOW[what]
    found = live(grown, LIMITS)
    assert found is not None and not found.found.balanced
    assert found.found.part == part, found.sentence()
    assert found.found.is_usual == (part in (Part.ENGINES, Part.TRAINER))


@pytest.mark.parametrize("grown", HEALTHY)
def test_a_healthy_run_is_bound_by_engines_or_trainer_and_no_one_of_them_is_blamed(grown: Figures) -> None:
    found = live(grown, LIMITS)
    assert found is not None and found.found.is_usual and not found.slow, found and found.sentence()


def test_a_slow_engine_and_a_slow_rank_are_named() -> None:
    engine, rank = (live(SLOW[what][1], LIMITS) for what in ("a slow engine", "a slow rank"))
    assert engine is not None and engine.slow.startswith("generator-0 samples")
    assert rank is not None and rank.slow == "trainer-0 computes 2.60 s a step, others 1.25 s"


def test_the_start_of_a_run_counts_for_nothing() -> None:
    started = figures({"step": 0.3, "starting": 0.4, "warm_start": 0.2}, {"generating": 0.3, "starting": 0.6})
    found = live(started, LIMITS)
    assert found is not None and found.found.balanced


def test_nothing_is_said_after_too_few_steps_and_a_restarted_actor_counts_from_its_beginning() -> None:
    assert live(Figures(600.0, 2.0), LIMITS) is None
    before, now = figures({"step": 0.9}), figures({"step": 0.4})
    assert now.since(before).trainer["step"] == now.trainer["step"]


def test_a_part_that_becomes_slow_after_an_hour_is_named_within_a_minute_and_stays_out_of_ten_minutes() -> None:
    window, at = Window(), 0.0
    totals = {"step": 0.0, "waiting": 0.0, "decode": 0.0, "environment": 0.0, "generating": 0.0}

    def go_on(seconds: float, **shares: float) -> None:
        nonlocal at
        for _ in range(round(seconds / SAMPLE_SECONDS)):
            at += SAMPLE_SECONDS
            for name, share in shares.items():
                totals[name] += share * SAMPLE_SECONDS
            driver = {name: totals[name] for name in ("step", "waiting")}
            trajectories = {name: totals[name] for name in ("decode", "environment")}
            engines = {"generator-0": {"generating": totals["generating"]}}
            window.add(Figures(at, at, driver, engines, trajectories=trajectories, played=at))

    go_on(6 * WINDOW_SECONDS, step=0.4, waiting=0.6, decode=60.0, environment=4.0, generating=0.98)
    healthy = window.now(LIMITS)
    go_on(NOW_SECONDS + SAMPLE_SECONDS, step=0.1, waiting=0.9, decode=10.0, environment=54.0, generating=0.98)
    slow, long = window.now(LIMITS), window.live(LIMITS)
    assert (
        healthy is not None and healthy.found.part == Part.ENGINES and f"last {NOW_SECONDS:.0f} s" in healthy.sentence()
    )
    assert slow is not None and slow.found.part == Part.ENVIRONMENT
    assert long is not None and long.found.part == Part.ENGINES and "last 10 min" in long.sentence()


def test_status_and_metrics_name_what_binds_within_a_minute_of_steps() -> None:
    clock, config = TurnedClock(), Config()
    hub = Hub(clock, Window())
    settings = config.run, config.generator, config.trainer, config.buffer
    hub.put_status("run", run_report(*settings, "runs/r", clock.wall()))
    thresholds = AlertThresholds.of(config)
    driver, generator = Metrics("driver", "driver", thresholds), Metrics("generator", "generator-0", thresholds)
    for second in range(60):
        clock.now += 1.0
        measure_states(driver, {"waiting": 0.7 * second, "step": 0.3 * second})
        driver.count_to("baton_optimizer_steps_total", second)
        measure_states(generator, {"generating": 0.99 * second})
        for part, seconds in (("decode", 1.0), ("environment", 9.0)):
            generator.observe("baton_trajectory_seconds", seconds, env="search", part=part)
        hub.push("driver/driver", driver.snapshot())
        hub.push("generator/generator-0", generator.snapshot())
        hub.put_status("buffer", {"accepted_tokens": second})
        if second <= SAMPLE_SECONDS / 2:
            assert hub.status()["binding"] is None
    (line,) = [line for line in status_lines(hub.status()) if line.startswith("  binds")]
    assert "training waits" in line and "environment takes" in line
    assert b'baton_binding_ratio{ident="metrics-hub",part="environment",role="hub"} 0.' in hub.page()
