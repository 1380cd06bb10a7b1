"""The parts of a panel of a Grafana dashboard, and the PromQL that panels have in common."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Query(NamedTuple):
    """One PromQL expression and the name of its series."""

    expr: str
    legend: str = ""


class Panel(NamedTuple):
    """A panel: its title, the sentence that explains it, its queries and its unit."""

    title: str
    meaning: str
    queries: tuple[Query, ...]
    unit: str = "none"
    kind: Literal["timeseries", "stat", "heatmap"] = "timeseries"
    stacked: bool = False


class Dashboard(NamedTuple):
    """A page of panels. Row `i` has `rows[i]` panels of the same width."""

    uid: str
    title: str
    meaning: str
    rows: tuple[int, ...]
    panels: tuple[Panel, ...]


def dashboard(uid: str, title: str, meaning: str, rows: tuple[int, ...], *panels: Panel) -> Dashboard:
    """Make a page of panels.

    Raises:
        ValueError: the rows do not have room for exactly these panels.
    """
    if sum(rows) != len(panels):
        raise ValueError(f"{uid}: {len(panels)} panels, and rows for {sum(rows)}")
    return Dashboard(uid, title, meaning, rows, panels)


def graph(title: str, meaning: str, *queries: Query, unit: str = "none", stacked: bool = False) -> Panel:
    """A panel of lines over time."""
    return Panel(title, meaning, queries, unit, stacked=stacked)


def stat(title: str, meaning: str, expr: str, legend: str = "", unit: str = "none") -> Panel:
    """A panel with the newest value as a number."""
    return Panel(title, meaning, (Query(expr, legend),), unit, "stat")


def heatmap(title: str, meaning: str, histogram: str) -> Panel:
    """A panel with the distribution of a histogram over time."""
    return Panel(title, meaning, (Query(rate(f"{histogram}_bucket", "le"), "{{le}}"),), kind="heatmap")


def chosen(name: str, *matchers: str) -> str:
    """The series of a metric in the chosen runs."""
    return name + "{" + ", ".join(['instance=~"$instance"', *matchers]) + "}"


def rate(name: str, by: str = "") -> str:
    """Growth of a counter per second, summed over all actors of a run."""
    return f"sum by (instance{', ' + by if by else ''}) (rate({chosen(name)}[$__rate_interval]))"


def last(name: str) -> str:
    """The value of a gauge that a single actor of a run sets."""
    return f"max by (instance) ({chosen(name)})"


def mean(name: str) -> str:
    """The mean of a histogram's observations."""
    return rate_ratio(f"{name}_sum", f"{name}_count")


def quantile(q: float, name: str) -> str:
    """A quantile of a histogram; its buckets limit the precision."""
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', 'le')})"


def rate_ratio(part: str, whole: str, by: str = "") -> str:
    """The growth of one counter divided by the growth of another."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def last_ratio(part: str, whole: str) -> str:
    """One gauge divided by another."""
    return f"{last(part)} / {last(whole)}"


def mean_and_tail(name: str) -> tuple[Query, Query]:
    """Mean and 99th percentile of a histogram."""
    return Query(mean(name), "mean"), Query(quantile(0.99, name), "99 %")


def distribution(name: str) -> tuple[Query, Query, Query]:
    """Median, 99th percentile and mean of a histogram."""
    return Query(quantile(0.5, name), "median"), Query(quantile(0.99, name), "99 %"), Query(mean(name), "mean")


def total(metric: str, *matchers: str, by: str = "instance") -> str:
    """The sum of a metric's series."""
    return f"sum by ({by}) ({chosen(metric, *matchers)})"


def states(role: str, by: str) -> str:
    """Fractions of time by state of the actors of a role."""
    series = chosen("baton_state_seconds_total", f'role="{role}"')
    return f"sum by (instance, {by}) (rate({series}[$__rate_interval]))"
