"""A run's timeline as Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

driver        trainer         the state of the trainer as a whole
trainer-0     rank            forward and backward, optimizer; while the rank waits, the state of the driver
generator-0   engine          generating, paused, environment, waiting, starting
              trajectories    a sample of them, with turns and tool calls; overlapping ones are on different rows
buffer        leases, commits, journal, and counters of its groups

A sampled trajectory is a flow: claim -> turns and tool calls -> lease -> commit. Times are microseconds from the first
event on. Format: the Trace Event Format of Chromium, as a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from time import gmtime, strftime
from typing import Any, NamedTuple

from service.run.timeline import Row, RunTimeline, Span

Event = dict[str, Any]
ORDER = ("driver", "trainer", "generator", "buffer")
"""Roles of processes, in the order from top to bottom of the trace."""
LEASES, COMMITS = ("buffer/buffer", "leases"), ("buffer/buffer", "commits")
TRAINER = ("driver/driver", "trainer")
WAITING = "waiting"


class Drawn(NamedTuple):
    """A bar on a row of the trace: one span of time (a slice)."""

    row: Row
    span: Span


def chrome_trace(timeline: RunTimeline) -> dict[str, Any]:
    """The whole trace as JSON values."""
    sampled = list(_trajectories(timeline))
    drawn = [*_states(timeline), *(one for slices in sampled for one in slices)]
    start = min([one.span.began for one in drawn] + [counter.at for _, counter in timeline.counters], default=0.0)

    def us(at: float) -> float:
        return round((at - start) * 1e6, 1)

    sources = sorted(timeline.sources, key=lambda source: (_place(source), source))
    pids = {source: number for number, source in enumerate(sources, 1)}
    tids = {row: number for number, row in enumerate(dict.fromkeys(one.row for one in drawn), 1)}
    events = [*_names(timeline, pids, tids)]
    for row, (began, ended, name, detail) in drawn:
        at = {"ts": us(began), "dur": round(us(ended) - us(began), 1), "pid": pids[row[0]], "tid": tids[row]}
        category = row[1].partition(" ")[0]
        events.append({"ph": "X", "name": name, "cat": category, **at, "args": detail})
    for owner, counter in timeline.counters:
        at = {"ts": us(counter.at), "pid": pids[owner]}
        events.append({"ph": "C", "name": counter.name, **at, "args": counter.values})
    for number, points in _flows(timeline, sampled):
        phases = ["s", *"t" * (len(points) - 2), "f"]
        for phase, (row, span) in zip(phases, points, strict=True):
            at = {"ts": us(span.began), "pid": pids[row[0]], "tid": tids[row]}
            events.append({"ph": phase, "bp": "e", "name": "trajectory", "cat": "flow", "id": number, **at})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _about(timeline, start)}


def trace_lines(trace: dict[str, Any]) -> Iterator[str]:
    """The lines of the trace file, one event per line."""
    yield f'{{"otherData":{json.dumps(trace["otherData"])},"displayTimeUnit":"ms","traceEvents":[\n'
    for number, event in enumerate(trace["traceEvents"]):
        yield f"{',' if number else ''}{json.dumps(event, separators=(',', ':'))}\n"
    yield "]}\n"


def _states(timeline: RunTimeline) -> Iterator[Drawn]:
    for row, spans in timeline.rows.items():
        for span in _explained(spans, timeline.rows.get(TRAINER, [])) if row[1] == "rank" else spans:
            shown = {key: len(value) if isinstance(value, list) else value for key, value in span.detail.items()}
            yield Drawn(row, span._replace(detail=shown))


def _explained(spans: Iterable[Span], doing: Sequence[Span]) -> Iterator[Span]:
    """A rank's spans, in which each wait is split by what the driver did meanwhile. `doing`: the driver's spans, in
    order of time."""
    first = 0
    for span in spans:
        if span.name != WAITING:
            yield span
            continue
        while first < len(doing) and doing[first].ended <= span.began:
            first += 1
        at = span.began
        for other in doing[first:]:
            if other.began >= span.ended:
                break
            began, ended = max(at, other.began), min(span.ended, other.ended)
            if began > at:
                yield Span(at, began, WAITING, {})
            what = "mini-batch" if other.name == WAITING else other.name
            yield Span(began, ended, f"{WAITING}: {what}", other.detail)
            at = ended
        if at < span.ended:
            yield Span(at, span.ended, WAITING, {})


def _trajectories(timeline: RunTimeline) -> Iterator[list[Drawn]]:
    """Each sampled trajectory as a whole, its claim and its calls, on a free row of its generator; simultaneous calls
    need more rows."""
    busy: dict[str, list[tuple[float, int]]] = {}
    """(end, number) of each generator's rows; the row that becomes free first comes first."""

    def lane(owner: str, began: float, ended: float) -> Row:
        rows = busy.setdefault(owner, [])
        is_free = bool(rows) and rows[0][0] <= began
        number = heappop(rows)[1] if is_free else len(rows) + 1
        heappush(rows, (ended, number))
        return owner, f"trajectories {number}"

    for one in timeline.trajectories:
        row = lane(one.owner, one.span.began, one.span.ended)
        first = one.calls[0].began if one.calls else one.span.ended
        drawn = [Drawn(row, one.span), Drawn(row, Span(one.span.began, first, "claim", {}))]
        at = one.span.began
        for call in one.calls:
            if call.began >= at:
                drawn.append(Drawn(row, call))
                at = call.ended
            else:
                drawn.append(Drawn(lane(one.owner, call.began, call.ended), call))
        yield drawn


def _flows(timeline: RunTimeline, sampled: Sequence[Sequence[Drawn]]) -> Iterator[tuple[int, list[Drawn]]]:
    """For each trajectory, its number and the points of its flow: its claim and calls in order of time, the last lease
    of its group, and the commit of that lease."""
    leases = {group: span for span in timeline.rows.get(LEASES, []) for group in span.detail["groups"]}
    commits = {span.detail["lease"]: span for span in timeline.rows.get(COMMITS, [])}
    for number, (trajectory, (_, *slices)) in enumerate(zip(timeline.trajectories, sampled, strict=True)):
        points = sorted(slices, key=lambda point: point.span.began)
        if (lease := leases.get(trajectory.of.group_id)) is not None and lease.ended >= trajectory.span.ended:
            points.append(Drawn(LEASES, lease))
            if (commit := commits.get(lease.detail["lease"])) is not None:
                points.append(Drawn(COMMITS, commit))
        if len(points) > 1:
            yield number, points


def _names(timeline: RunTimeline, pids: dict[str, int], tids: dict[Row, int]) -> Iterator[Event]:
    for source, pid in pids.items():
        about = timeline.sources[source]
        name = f"{source.partition('/')[2]} on {about.host}, process {about.pid}"
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for (source, row), tid in tids.items():
        at = {"pid": pids[source], "tid": tid}
        yield {"ph": "M", "name": "thread_name", **at, "args": {"name": row}}
        yield {"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": tid}}


def _place(source: str) -> int:
    role = source.partition("/")[0]
    return ORDER.index(role) if role in ORDER else len(ORDER)


def _about(timeline: RunTimeline, start: float) -> dict[str, Any]:
    """Notes for the reader about the sample and the clocks."""
    every = max((totals.every for totals in timeline.totals.values()), default=1)
    return {
        "begins": strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(start)),
        "trajectories": f"{len(timeline.trajectories)} kept of {timeline.played}: at the end one in {every} of a "
        "generator, and the slowest of each ten seconds",
        "clocks": "hosts are aligned by their wall clocks",
        "dropped events": sum(about.dropped for about in timeline.sources.values()),
    }
