"""The one table, the recorder over it, and the hub that brings the actors' numbers together."""

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.config import Config, load_config
from service.observe.merged_metrics import Hub
from service.observe.metrics import AlertThresholds, Metrics, bucket_bounds
from service.observe.metrics_table import LENGTH, TABLE
from tests.pure.buffer.world import TurnedClock

CONFIG = Config()
THRESHOLDS = AlertThresholds.of(CONFIG)


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of a page by its name and labels; the page must parse."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(text: bytes, name: str, **labels: str) -> float:
    return samples(text)[name, frozenset(labels.items())]


def test_the_table_follows_the_naming_rules() -> None:
    assert len({metric.name for metric in TABLE}) == len(TABLE)
    for metric in TABLE:
        assert metric.name.startswith("baton_") and metric.help.endswith("."), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert not {"le", "role", "ident"} & set(metric.labels), metric.name


def test_a_histogram_of_an_array_is_exact_and_a_value_on_a_bound_lies_below_it() -> None:
    metrics = Metrics("trainer", "t", THRESHOLDS)
    metrics.observe("baton_row_length_tokens", np.array([1, 80, 81, 5000]))
    metrics.observe("baton_row_length_tokens", 80)
    text = metrics.snapshot()
    where = {"role": "trainer", "ident": "t"}
    assert value(text, "baton_row_length_tokens_bucket", le="80.0", **where) == 3
    assert value(text, "baton_row_length_tokens_bucket", le="160.0", **where) == 4
    assert value(text, "baton_row_length_tokens_bucket", le="+Inf", **where) == 5
    assert value(text, "baton_row_length_tokens_count", **where) == 5
    assert value(text, "baton_row_length_tokens_sum", **where) == 1 + 80 + 81 + 5000 + 80


def test_length_buckets_end_at_the_longest_row_and_hold_the_alert_threshold() -> None:
    config = load_config([], ["generator.max_input_length=6000", "metrics.long_batch_tokens=5000"])
    bounds = bucket_bounds(AlertThresholds.of(config))[LENGTH]
    assert 5000.0 in bounds and bounds[-1] == 6256.0
    assert THRESHOLDS.long_batch == 960 and 960.0 in bucket_bounds(THRESHOLDS)[LENGTH]
    assert list(bounds) == sorted(set(bounds))


def test_every_histogram_has_bounds_and_every_alert_threshold_is_a_gauge() -> None:
    assert {metric.buckets for metric in TABLE if metric.kind == "histogram"} == set(bucket_bounds(THRESHOLDS))
    assert THRESHOLDS.gauges().keys() <= {metric.name for metric in TABLE if metric.kind == "gauge"}


def test_a_counter_that_is_kept_elsewhere_is_set_to_its_total_and_never_goes_down() -> None:
    metrics = Metrics("buffer", "b", THRESHOLDS)
    for total in (5, 9, 7):
        metrics.count_to("baton_accepted_tokens_total", total)
    assert value(metrics.snapshot(), "baton_accepted_tokens_total", role="buffer", ident="b") == 9
    with pytest.raises(ValueError, match="cannot go down"):
        metrics.count("baton_accepted_tokens_total", -1)


def test_what_the_table_does_not_have_cannot_be_recorded() -> None:
    metrics = Metrics("buffer", "b", THRESHOLDS)
    with pytest.raises(ValueError, match="not in the table"):
        metrics.set("baton_tokenz", 1)
    with pytest.raises(ValueError, match="a counter with labels"):
        metrics.set("baton_refused_messages_total", 1, reason="schema")
    with pytest.raises(ValueError, match=r"labels \('fate',\)"):
        metrics.set("baton_tokens", 1)
    with pytest.raises(ValueError, match="not a gauge with labels"):
        metrics.set_all("baton_buffer_groups", "fate", {})


def test_the_hub_merges_the_actors_numbers_family_by_family() -> None:
    hub = Hub(TurnedClock())
    for ident in ("generator-0", "generator-1"):
        metrics = Metrics("generator", ident, THRESHOLDS)
        metrics.count("baton_generated_tokens_total", 7)
        metrics.observe("baton_generator_wait_seconds", 0.5, reason="lookahead")
        hub.push(f"generator/{ident}", metrics.snapshot())
    page = hub.page()
    assert page.count(b"# TYPE baton_generated_tokens_total counter") == 1
    assert value(page, "baton_generated_tokens_total", role="generator", ident="generator-1") == 7
    assert value(page, "baton_actor_up", role="generator", ident="generator-0") == 1
    assert hub.silent() == []


def test_a_restarted_actor_takes_the_place_of_its_former_self() -> None:
    hub = Hub(TurnedClock())
    for version in (5, 6):
        metrics = Metrics("trainer", "trainer-0", THRESHOLDS)
        metrics.set("baton_policy_version", version)
        hub.push("trainer/trainer-0", metrics.snapshot())
    assert [s for s in samples(hub.page()) if s[0] == "baton_policy_version"] == [
        ("baton_policy_version", frozenset({("role", "trainer"), ("ident", "trainer-0")}))
    ]
    assert value(hub.page(), "baton_policy_version", role="trainer", ident="trainer-0") == 6


def test_a_silent_actor_is_down_keeps_its_counters_and_loses_its_gauges() -> None:
    clock = TurnedClock()
    hub = Hub(clock)
    metrics = Metrics("generator", "g", THRESHOLDS)
    metrics.count("baton_generated_tokens_total", 7)
    metrics.set("baton_generator_running_requests", 3)
    hub.push("generator/g", metrics.snapshot())
    clock.now += 11
    hub.push("buffer/b", b"")
    page = hub.page()
    assert value(page, "baton_actor_up", role="generator", ident="g") == 0
    assert value(page, "baton_actor_age_seconds", role="generator", ident="g") == 11
    assert value(page, "baton_generated_tokens_total", role="generator", ident="g") == 7
    assert b"baton_generator_running_requests" not in page
    assert hub.silent() == ["generator/g"]
    assert hub.status()["actors"][1]["state"] == "silent"


def test_the_history_gives_the_steps_after_a_step_as_columns_without_nan() -> None:
    hub = Hub(TurnedClock())
    for step in (1, 2, 3):
        hub.put_status("step", {"trainer/global_step": step, "reward/avg_raw_reward": step / 10})
    hub.put_status("step", {"trainer/global_step": 4, "reward/avg_raw_reward": float("nan")})
    history = hub.history(2)
    assert history["steps"] == [3, 4]
    assert history["columns"]["reward/avg_raw_reward"] == [0.3, None]
    assert history["columns"]["timing/step"] == [None, None]


def test_steps_that_a_trainer_takes_again_replace_those_it_took_before() -> None:
    hub = Hub(TurnedClock())
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.7)):
        hub.put_status("step", {"trainer/global_step": step, "reward/avg_raw_reward": reward})
    history = hub.history(-1)
    assert (history["steps"], history["columns"]["reward/avg_raw_reward"]) == ([1, 2], [0.1, 0.7])


def test_the_hub_takes_the_buffers_rate_over_its_last_reports() -> None:
    clock = TurnedClock()
    hub = Hub(clock)
    for second in range(20):
        hub.put_status("buffer", {"accepted_tokens": 100 * second})
        clock.now += 1
    assert hub.status()["buffer"]["tokens_per_second"] == 100
