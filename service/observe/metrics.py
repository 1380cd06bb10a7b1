"""What an actor measures: a recorder over the one table, and its numbers as Prometheus text.

metrics = Metrics("trainer", "trainer-0", Boundaries.of(config))
metrics.set("baton_policy_version", 12)
metrics.observe("baton_row_length_tokens", lengths_R)        # a whole array at once
hub.push("trainer", "trainer-0", metrics.snapshot())
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import ArrayLike
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from service.config import Config
from service.observe.metrics_table import BY_NAME, Metric
from service.types import Float64s, Int64s

SOURCE_LABELS = ("role", "ident")

MAX_SERIES = 64
"""Series of one metric in one actor; label values beyond are counted together as OTHER, so none grow without end."""

OTHER = "other"

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(frozen=True)
class Boundaries:
    """The upper bounds of the histograms' buckets; the same in every actor of a run, so that they add up."""

    length: tuple[float, ...]
    turns: tuple[float, ...]
    staleness: tuple[float, ...]
    seconds: tuple[float, ...] = tuple(base * 10.0**power for power in range(-3, 4) for base in (1, 2, 5))
    """1 ms to 5000 s."""

    @staticmethod
    def of(config: Config) -> Boundaries:
        """Sixteen even steps up to the longest row, the alert threshold among them."""
        longest = config.generator.max_input_length + config.generator.max_generate_length
        even = {float(longest * step // 16) for step in range(1, 17)}
        bound = config.buffer.max_staleness
        return Boundaries(
            length=tuple(sorted(even | {float(long_batch_tokens(config))})),
            turns=tuple(float(n) for n in sorted({*range(1, 9), 12, 16, 24, 32, 48, 64, config.env.max_turns})),
            staleness=tuple(float(n) for n in sorted({*range(9), bound, bound + 1, 2 * bound, 16, 32, 64})),
        )


def long_batch_tokens(config: Config) -> int:
    """The padded length above which a mini-batch counts as long."""
    longest = config.generator.max_input_length + config.generator.max_generate_length
    return config.metrics.long_batch_tokens or longest * 12 // 16


class Metrics:
    """The numbers of one actor; safe to use from several threads."""

    def __init__(self, role: str, ident: str, boundaries: Boundaries) -> None:
        self._source = (role, ident)
        self._boundaries = boundaries
        self._numbers: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], _Histogram]] = {}
        self._lock = Lock()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_TableCollector(self))

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._put(_row(name, "gauge", labels), value, labels, add=False)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        if amount < 0:
            raise ValueError(f"{name} cannot go down by {-amount:g}")
        self._put(_row(name, "counter", labels), amount, labels, add=True)

    def count_to(self, name: str, total: float, **labels: str) -> None:
        """Set a counter to a total that is kept elsewhere; it never goes down."""
        metric = _row(name, "counter", labels)
        with self._lock:
            series = self._numbers.setdefault(metric.name, {})
            key = _key(metric, labels, series)
            series[key] = max(series.get(key, 0.0), float(total))

    def observe(self, name: str, values: ArrayLike, weights: ArrayLike | None = None, **labels: str) -> None:
        """Add one value or an array of values to a histogram, each counted once or `weights` times."""
        metric = _row(name, "histogram", labels)
        with self._lock:
            series = self._histograms.setdefault(metric.name, {})
            key = _key(metric, labels, series)
            if key not in series:
                series[key] = _Histogram(getattr(self._boundaries, metric.buckets))
            series[key].observe(np.atleast_1d(np.asarray(values, dtype=np.float64)), weights)

    def forget(self, name: str) -> None:
        """Drop all series of a gauge; used before setting those that exist now."""
        with self._lock:
            self._numbers.pop(name, None)

    def snapshot(self) -> bytes:
        """Everything as Prometheus text, with `role` and `ident` on every series."""
        return generate_latest(self._registry)

    def spent(self, seconds: float) -> None:
        """Measuring took this many CPU seconds."""
        self.count("baton_metrics_seconds_total", seconds)

    def in_ray(self) -> list[tuple[Metric, dict[str, str], float]]:
        """The gauges that Ray shows too, with their labels, as they are now."""
        with self._lock:
            return [
                (BY_NAME[name], dict(zip(BY_NAME[name].labels, key, strict=True)), value)
                for name, series in self._numbers.items()
                if BY_NAME[name].in_ray
                for key, value in series.items()
            ]

    def families(self) -> Iterator[Family]:
        """The families that have been measured, in the client library's form."""
        with self._lock:
            for name, series in self._numbers.items():
                yield self._number_family(BY_NAME[name], series)
            for name, histograms in self._histograms.items():
                yield self._histogram_family(BY_NAME[name], histograms)

    def _put(self, metric: Metric, value: float, labels: dict[str, str], add: bool) -> None:
        with self._lock:
            series = self._numbers.setdefault(metric.name, {})
            key = _key(metric, labels, series)
            series[key] = series.get(key, 0.0) + float(value) if add else float(value)

    def _number_family(self, metric: Metric, series: dict[tuple[str, ...], float]) -> Family:
        family: Family
        if metric.kind == "counter":
            family = CounterMetricFamily(metric.name, metric.help, labels=(*SOURCE_LABELS, *metric.labels))
        else:
            family = GaugeMetricFamily(metric.name, metric.help, labels=(*SOURCE_LABELS, *metric.labels))
        for key, value in series.items():
            family.add_metric((*self._source, *key), value)
        return family

    def _histogram_family(self, metric: Metric, series: dict[tuple[str, ...], _Histogram]) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=(*SOURCE_LABELS, *metric.labels))
        for key, histogram in series.items():
            family.add_metric((*self._source, *key), histogram.buckets(), sum_value=histogram.sum)
        return family


class _TableCollector(Collector):
    """Hands the recorder's families to a registry of the client library."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        """Called by the registry at every snapshot."""
        return self._metrics.families()


class _Histogram:
    """Counts per bucket, filled by whole arrays; the sum is exact."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = np.array(bounds)
        self._counts: Float64s | Int64s = np.zeros(len(bounds) + 1)
        self.sum = 0.0

    def observe(self, values: Float64s, weights: ArrayLike | None) -> None:
        """A value on a bound belongs to the bucket that ends there."""
        bucket = np.searchsorted(self._bounds, values, side="left")
        weight = None if weights is None else np.atleast_1d(np.asarray(weights, dtype=np.float64))
        self._counts = self._counts + np.bincount(bucket, weights=weight, minlength=len(self._counts))
        self.sum += float(values.sum() if weight is None else (values * weight).sum())

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), cumulative, as Prometheus wants them."""
        bounds = [*(str(bound) for bound in self._bounds.tolist()), "+Inf"]
        return list(zip(bounds, np.cumsum(self._counts).tolist(), strict=True))


def _key(metric: Metric, labels: dict[str, str], series: Mapping[tuple[str, ...], object]) -> tuple[str, ...]:
    """The label values in the table's order."""
    key = tuple(labels[label] for label in metric.labels)
    return key if key in series or len(series) < MAX_SERIES else (OTHER,) * len(key)


def _row(name: str, kind: str, labels: dict[str, str]) -> Metric:
    """The table's row; a metric that is not in it, or is used otherwise than it says, is a bug."""
    metric = BY_NAME.get(name)
    if metric is None or metric.kind != kind or set(metric.labels) != set(labels):
        known = "not in the table" if metric is None else f"a {metric.kind} with labels {metric.labels}"
        raise ValueError(f"{name} is {known}, not a {kind} with labels {tuple(labels)}")
    return metric
