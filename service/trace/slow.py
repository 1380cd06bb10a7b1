"""Shows where a run's trajectories spent their time: by part, by environment and tool, and the slowest trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.errors import UserError, in_one_line
from service.run.timeline import SLOW, RunTimeline, Sampled

TOOL = "tool:"


class Spent(NamedTuple):
    """The seconds that all trajectories of an environment spent in one part of their time, such as `decode`, or in the
    calls of one tool."""

    env: str
    name: str
    number: int
    seconds: float
    longest: float

    @property
    def mean(self) -> float:
        """Mean seconds per trajectory; for a tool, per call."""
        return self.seconds / self.number if self.number else 0.0


def spent(timeline: RunTimeline) -> list[Spent]:
    """The seconds by environment, and by part of the trajectories' time or tool, summed over all processes, largest
    first."""
    sums: dict[tuple[str, str], Spent] = {}
    for one in (Spent(*line) for totals in timeline.totals.values() for line in totals.sums):
        of = sums.get((one.env, one.name), Spent(one.env, one.name, 0, 0.0, 0.0))
        longest = max(of.longest, one.longest)
        sums[one.env, one.name] = Spent(one.env, one.name, of.number + one.number, of.seconds + one.seconds, longest)
    return sorted(sums.values(), key=lambda one: -one.seconds)


def slowest(timeline: RunTimeline) -> list[Sampled]:
    """The recorded trajectories, slowest first."""
    return sorted(timeline.trajectories, key=lambda one: -one.span.seconds)


def print_slow(console: Console, timeline: RunTimeline, last: int) -> None:
    """Print where the time went, and the slowest trajectories.

    Raises:
        UserError: the timeline has no trajectory yet.
    """
    found = spent(timeline)
    if not found and not timeline.trajectories:
        raise UserError("the timeline has no trajectory that ended yet")
    whole = {env: sum(one.seconds for one in found if one.env == env and not _is_tool(one)) for env, *_ in found}
    parts = [one for one in found if not _is_tool(one) and one.seconds]
    rows = ((one.env, one.name, *_figures(one, whole), *_quantiles(timeline, one)) for one in parts)
    _print(console, ("environment", "part", "share", "mean", "longest", "50 %", "99 %"), rows)
    tools = [one for one in found if _is_tool(one)]
    calls = ((one.env, one.name.removeprefix(TOOL), *_figures(one, whole), f"{one.number:,}") for one in tools)
    _print(console, ("environment", "tool", "share", "mean", "longest", "calls"), calls)
    worst = ((str(one.of), f"{one.span.seconds:.2f} s", one.env, *_most(one)) for one in slowest(timeline)[:last])
    _print(console, ("slowest", "seconds", "environment", "most of it", "longest call"), worst)
    kept = len(timeline.trajectories)
    note = f"shares, means and longest: of all {timeline.played:,}; quantiles and the slowest: of {kept:,} kept ones; "
    console.print(Text(note + "`baton trajectories slow RUN ID` shows the calls of one", style="dim"))


def print_calls(console: Console, timeline: RunTimeline, wanted: str) -> None:
    """Print the calls of one trajectory, in order.

    Raises:
        UserError: no recorded trajectory has that id.
    """
    start = wanted if wanted.startswith("group=") else f"group={wanted}"
    one = next((one for one in slowest(timeline) if f"{one.of}/".startswith(f"{start}/")), None)
    if one is None:
        raise UserError(f"{wanted}: not among the {len(timeline.trajectories)} trajectories that the timeline keeps")
    head = f"{one.of}  {one.span.seconds:.2f} s on {one.owner.partition('/')[2]}"
    console.print(Text(in_one_line(head), style="bold"))
    parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in one.parts.items())
    console.print(Text(in_one_line(f"{one.env}, ended by {one.span.detail['ended by']}: {parts}")))
    rows = (
        (f"{call.began - one.span.began:.3f} s", call.name, f"{call.seconds:.3f} s", _detail(call.detail))
        for call in one.calls
    )
    _print(console, ("after", "call", "took", "of which"), rows)


def _print(console: Console, head: Sequence[str], rows: Iterator[tuple[str, ...]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in head:
        words = name in ("environment", "part", "tool", "slowest", "most of it", "longest call", "call", "of which")
        table.add_column(name, justify="left" if words else "right", no_wrap=name == "slowest")
    for row in rows:
        table.add_row(*(Text(in_one_line(cell)) for cell in row))
    if table.row_count:
        console.print(table)
        console.print()


def _is_tool(one: Spent) -> bool:
    return one.name.startswith(TOOL)


def _figures(one: Spent, whole: dict[str, float]) -> tuple[str, str, str]:
    share = one.seconds / whole[one.env] if whole.get(one.env) else 0.0
    return f"{share:.0%}", f"{one.mean:.3f} s", f"{one.longest:.2f} s"


def _quantiles(timeline: RunTimeline, one: Spent) -> tuple[str, str]:
    """Median and 99th percentile in the sample, without trajectories that were kept only because they were slow."""
    of = [each for each in timeline.trajectories if each.env == one.env and each.why != SLOW]
    if not of:
        return "-", "-"
    seconds = [each.parts.get(one.name, 0.0) for each in of]
    median, tail = np.quantile(seconds, [0.5, 0.99])
    return f"{median:.3f} s", f"{tail:.2f} s"


def _most(one: Sampled) -> tuple[str, str]:
    """The part with the largest share of a trajectory's time, and the trajectory's longest call."""
    part, seconds = max(one.parts.items(), key=lambda item: item[1], default=("-", 0.0))
    longest = max(one.calls, key=lambda call: call.seconds, default=None)
    call = "-" if longest is None else f"{longest.name}, {longest.seconds:.2f} s"
    return f"{part} {seconds / max(one.span.seconds, 1e-9):.0%}", call


def _detail(detail: dict[str, float]) -> str:
    return ", ".join(
        f"{value:.0f} {name}" if name == "tokens" else f"{name} {value:.3f} s" for name, value in detail.items()
    )
