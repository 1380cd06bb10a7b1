"""What a panel of a Grafana dashboard is made of, and the PromQL that panels have in common."""

from __future__ import annotations

from typing import Literal, NamedTuple

RUN = '{instance=~"$instance"}'


class Query(NamedTuple):
    """One PromQL expression and how its series are named."""

    expr: str
    legend: str = ""


class Panel(NamedTuple):
    """A panel: its title, unit, queries, and what it means."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    meaning: str
    width: int = 12
    kind: Literal["timeseries", "stat", "heatmap"] = "timeseries"
    stacked: bool = False


class Dashboard(NamedTuple):
    """A page of panels."""

    uid: str
    title: str
    meaning: str
    panels: tuple[Panel, ...]


def rate(name: str, by: str = "") -> str:
    """Per second, over all actors of a run."""
    return f"sum by (instance{', ' + by if by else ''}) (rate({name}{RUN}[$__rate_interval]))"


def last(name: str) -> str:
    """A gauge of a run that one actor sets."""
    return f"max by (instance) ({name}{RUN})"


def mean(name: str) -> str:
    """The mean of a histogram's observations."""
    return f"{rate(name + '_sum')} / {rate(name + '_count')}"


def quantile(share: float, name: str) -> str:
    """A quantile of a histogram, as exact as its buckets."""
    return f"histogram_quantile({share}, {rate(name + '_bucket', 'le')})"


def share(part_name: str, whole_name: str) -> str:
    """One counter's growth as a share of another's."""
    return f"{rate(part_name)} / {rate(whole_name)}"


def part(part_name: str, whole_name: str) -> str:
    """One gauge as a part of another."""
    return f"{last(part_name)} / {last(whole_name)}"


def mean_and_worst(name: str) -> tuple[Query, ...]:
    """Mean and 99 % of a histogram."""
    return Query(mean(name), "mean"), Query(quantile(0.99, name), "99 %")


def spread(name: str) -> tuple[Query, ...]:
    """Median, 99 % and mean of a histogram."""
    return Query(quantile(0.5, name), "median"), Query(quantile(0.99, name), "99 %"), Query(mean(name), "mean")
