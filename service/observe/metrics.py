"""The metrics of one actor: a recorder of the metrics in the table, and its snapshot as Prometheus text.

metrics = Metrics("trainer", "trainer-0", AlertThresholds.of(config))
metrics.set("baton_policy_version", 12)
metrics.observe("baton_row_length_tokens", lengths_R)        # a whole array at once
hub.push("trainer/trainer-0", metrics.snapshot())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from service.config import Config
from service.observe.metrics_table import BY_NAME, FRACTION, LENGTH, SECONDS, STALENESS, TURNS, Kind, Metric
from service.types import Float64s, Int64s

SOURCE_LABELS = ("role", "ident")

MAX_SERIES = 64
"""Maximum number of series of one metric in one actor. Further label values are counted together as OTHER, so memory is
bounded."""

OTHER = "other"

FAMILIES: Mapping[Kind, Any] = {
    "counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily
}  # fmt: skip
Key = tuple[str, ...]
"""The label values of a series, in the table's order."""
Series = TypeVar("Series")


@dataclass(frozen=True)
class AlertThresholds:
    """Thresholds of alerts that depend on the settings, the same in all actors of a run. They are exported as gauges,
    so that deploy/prometheus/rules.yaml, which has the other thresholds, needs no edits."""

    longest_row: int
    """Length of the longest row that the limits allow, in tokens."""
    long_batch: int
    """Padded length above which a mini-batch counts as long: as configured, or 12/16 of the longest row."""
    max_turns: int
    max_staleness: int
    stall_deadline: float
    generators: int
    """Number of generators at the start; the only threshold that changes during a run."""

    @classmethod
    def of(cls, config: Config) -> AlertThresholds:
        """The thresholds from a run's configuration."""
        longest = config.generator.longest_row
        return cls(
            longest,
            config.metrics.long_batch_tokens or longest * 12 // 16,
            config.most_steps,
            config.buffer.max_staleness,
            config.run.stall_deadline,
            config.generator.min_engines,
        )

    def gauges(self) -> dict[str, float]:
        """The thresholds at the start of a run, by the names of their gauges in the metrics table."""
        return {
            "baton_batch_padded_sequence_length_alert_tokens": self.long_batch,
            "baton_staleness_budget_versions": self.max_staleness,
            "baton_stall_deadline_seconds": self.stall_deadline,
            "baton_generators_expected": self.generators,
        }


def bucket_bounds(thresholds: AlertThresholds) -> dict[str, tuple[float, ...]]:
    """The upper bounds of the histograms' buckets, by `Metric.buckets`. They are equal in all actors of a run.

    For lengths, there are sixteen evenly spaced bounds up to the longest row, and a bound at the alert threshold; for
    seconds, bounds from 1 ms to 5000 s.
    """
    bound = thresholds.max_staleness
    bounds: dict[str, set[int] | set[float]] = {
        LENGTH: {*(thresholds.longest_row * step // 16 for step in range(1, 17)), thresholds.long_batch},
        TURNS: {*range(1, 9), 12, 16, 24, 32, 48, 64, thresholds.max_turns},
        STALENESS: {*range(9), bound, bound + 1, 2 * bound, 16, 32, 64},
        SECONDS: {base * 10.0**power for power in range(-3, 4) for base in (1, 2, 5)},
        FRACTION: {step / 20 for step in range(1, 21)},
    }
    return {name: tuple(sorted(float(value) for value in values)) for name, values in bounds.items()}


class Metrics(Collector):
    """The recorder of one actor; safe to use from several threads.

    ValueError is raised for a metric that is not in the table, or that the table has with another kind or other labels.
    """

    def __init__(self, role: str, ident: str, thresholds: AlertThresholds) -> None:
        self._source = (role, ident)
        self._bounds = bucket_bounds(thresholds)
        self._numbers: dict[str, dict[Key, float]] = {}
        self._histograms: dict[str, dict[Key, _Histogram]] = {}
        self._lock = Lock()

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge to a value."""
        self._change(name, "gauge", labels, lambda _: float(value))

    def set_all(self, name: str, label: str, values: Mapping[str, float]) -> None:
        """Set all series of a gauge that has one label. `values`: a number for each value of the label. Other series
        are dropped."""
        metric = _row(name, "gauge", {label: ""})
        with self._lock:
            self._numbers.pop(name, None)
            for text, value in values.items():
                series, key = _series(self._numbers, metric, {label: text})
                series[key] = float(value)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add `amount` to a counter."""
        if amount < 0:
            raise ValueError(f"{name} cannot go down by {-amount:g}")
        self._change(name, "counter", labels, lambda before: before + float(amount))

    def count_to(self, name: str, total: float, **labels: str) -> None:
        """Set a counter to a total that is counted elsewhere. The counter never decreases."""
        self._change(name, "counter", labels, lambda before: max(before, float(total)))

    def _change(self, name: str, kind: Kind, labels: Mapping[str, str], new: Callable[[float], float]) -> None:
        with self._lock:
            series, key = _series(self._numbers, _row(name, kind, labels), labels)
            series[key] = new(series.get(key, 0.0))

    def observe(self, name: str, values: ArrayLike, weights: ArrayLike | None = None, **labels: str) -> None:
        """Add one value or an array of values to a histogram, each counted once or `weights` times."""
        metric = _row(name, "histogram", labels)
        with self._lock:
            series, key = _series(self._histograms, metric, labels)
            if key not in series:
                series[key] = _Histogram(self._bounds[metric.buckets])
            series[key].observe(np.atleast_1d(np.asarray(values, dtype=np.float64)), weights)

    def snapshot(self) -> bytes:
        """All metrics as Prometheus text, with `role` and `ident` on every series."""
        return generate_latest(self)

    def in_ray(self) -> list[tuple[Metric, dict[str, str], float]]:
        """The gauges that Ray's endpoints also serve: (metric, labels, value)."""
        with self._lock:
            return [
                (metric, dict(zip(metric.labels, key, strict=True)), value)
                for name, series in self._numbers.items()
                if (metric := BY_NAME[name]).in_ray
                for key, value in series.items()
            ]

    def collect(self) -> Iterator[Any]:
        """The measured metric families as objects of the client library, which `generate_latest` reads."""
        with self._lock:
            recorded: dict[str, dict[Key, float] | dict[Key, _Histogram]] = {**self._numbers, **self._histograms}
            for name, series in recorded.items():
                metric = BY_NAME[name]
                family = FAMILIES[metric.kind](name, metric.help, labels=(*SOURCE_LABELS, *metric.labels))
                for key, value in series.items():
                    values = (value.buckets(), value.sum) if isinstance(value, _Histogram) else (value,)
                    family.add_metric((*self._source, *key), *values)
                yield family


class _Histogram:
    """A histogram: counts per bucket, and an exact sum. Whole arrays can be added."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = np.array(bounds)
        self._counts: Float64s | Int64s = np.zeros(len(bounds) + 1)
        self.sum = 0.0

    def observe(self, values: Float64s, weights: ArrayLike | None) -> None:
        """Count values; a value equal to a bound belongs to the bucket that ends there."""
        bucket = np.searchsorted(self._bounds, values, side="left")
        weight = None if weights is None else np.atleast_1d(np.asarray(weights, dtype=np.float64))
        self._counts = self._counts + np.bincount(bucket, weights=weight, minlength=len(self._counts))
        self.sum += float(values.sum() if weight is None else (values * weight).sum())

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of values up to the bound), cumulative as in Prometheus' format."""
        bounds = [*(str(bound) for bound in self._bounds.tolist()), "+Inf"]
        return list(zip(bounds, np.cumsum(self._counts).tolist(), strict=True))


def _row(name: str, kind: Kind, labels: Mapping[str, str]) -> Metric:
    metric = BY_NAME.get(name)
    if metric is None or metric.kind != kind or set(metric.labels) != set(labels):
        known = "not in the table" if metric is None else f"a {metric.kind} with labels {metric.labels}"
        raise ValueError(f"{name} is {known}, not a {kind} with labels {tuple(labels)}")
    return metric


def _series(
    recorded: dict[str, dict[Key, Series]], metric: Metric, labels: Mapping[str, str]
) -> tuple[dict[Key, Series], Key]:
    """The series of a metric, and the key of the series with these labels."""
    series = recorded.setdefault(metric.name, {})
    key = tuple(labels[label] for label in metric.labels)
    return series, key if key in series or len(series) < MAX_SERIES else (OTHER,) * len(key)
