"""The cost of recording the timeline: time per event, times the number of events of a run, over its CPU seconds.

    python -m benchmarks.timeline runs/quickstart [picture.png]

The picture shows a few seconds of the trace as a viewer does. The CPU seconds are those of Baton's own processes,
without vLLM's core, whose work would make the share smaller.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from service.observe.recorder import SPAN, TRAJECTORY, States, Trace
from service.rollout.engine import Generation
from service.rollout.timelines import Timelines
from service.run.folder import TIMELINE
from service.run.timeline import RunTimeline, read_timeline
from service.trace.chrome import chrome_trace
from service.types import TrajectoryId

ROUNDS = 2000
SHOWN_SECONDS = 3.0
"""Seconds of the run that the picture shows."""


def seconds_each(do: Callable[[], None]) -> float:
    """Thread CPU seconds of one call, the best of five rounds."""
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        for _ in range(ROUNDS):
            do()
        best = min(best, (time.thread_time() - began) / ROUNDS)
    return best


def costs(calls: int) -> dict[str, float]:
    """Seconds to record a span with its change of state, a trajectory with `calls` calls, and a trajectory that is
    kept."""
    trace = Trace("generator/generator-0")
    states = States(trace, "engine", "waiting")
    states._record = lambda now, least: trace.span("engine", states.state, now, now)  # type: ignore[method-assign]

    def span() -> None:
        states.enter("generating" if states.state == "waiting" else "waiting")
        trace.take()

    generation = Generation(np.zeros(5, np.int32), np.zeros(5, np.float32), np.zeros(5, np.int64), "stop", True)
    timelines = Timelines()

    def trajectory() -> None:
        of = TrajectoryId(7, 3)
        with timelines.playing(of, "lookup") as line:
            for _ in range(calls):
                timelines.generated(f"{of}/turn=1", time.monotonic(), generation)
                timelines.answered(of, "step", time.monotonic())
            timelines.ended(line, "stop")
        timelines._sampled.clear()
        timelines._parts.clear()
        timelines._tools.clear()

    played = seconds_each(trajectory)
    of = TrajectoryId(7, 3)
    with timelines.playing(of, "lookup") as line:
        for _ in range(calls):
            timelines.generated(f"{of}/turn=1", time.monotonic(), generation)
            timelines.answered(of, "step", time.monotonic())
        timelines.ended(line, "stop")
    (ended,) = timelines._sampled

    def keep() -> None:
        trace.add(*ended.event("sampled"))
        trace.take()

    return {SPAN: seconds_each(span), "played": played, TRAJECTORY: seconds_each(keep)}


def draw(timeline: RunTimeline, file: Path) -> None:
    """Draw `SHOWN_SECONDS` from the middle of a run: the rows of the trace, and one trajectory's flow."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    trace = chrome_trace(timeline)
    named = [e for e in trace["traceEvents"] if e["ph"] == "M" and "name" in e["args"]]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in named}
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] != "claim"]
    commits = sorted(e["ts"] for e in slices if e["cat"] == "commits")
    start = commits[len(commits) // 2]
    shown = [e for e in slices if start <= e["ts"] + e["dur"] and e["ts"] <= start + SHOWN_SECONDS * 1e6]
    rows = sorted({(e["pid"], e["tid"]) for e in shown if not e["name"].startswith("group=")})
    kinds = dict.fromkeys(kind(e["name"]) for e in shown if not e["name"].startswith("group="))
    colours = {name: colormaps["tab20"](number % 20) for number, name in enumerate(kinds)}
    figure = Figure(figsize=(14, 0.38 * len(rows) + 1.6))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for e in shown:
        if (row := (e["pid"], e["tid"])) in rows and kind(e["name"]) in colours:
            at, ended = max(e["ts"], start), min(e["ts"] + e["dur"], start + SHOWN_SECONDS * 1e6)
            bar = [((at - start) / 1e6, (ended - at) / 1e6)]
            axes.broken_barh(bar, (rows.index(row) - 0.4, 0.8), color=colours[kind(e["name"])])
    flow = next(
        (flow for flow in flows(trace) if start < flow[0]["ts"] and flow[-1]["ts"] < start + SHOWN_SECONDS * 1e6), []
    )
    at_rows = [rows.index((e["pid"], e["tid"])) for e in flow]
    axes.plot([(e["ts"] - start) / 1e6 for e in flow], at_rows, "k.-", linewidth=1, markersize=4)
    processes = {pid: name.partition(" ")[0] for (pid, tid), name in names.items() if tid is None}
    axes.set_yticks(range(len(rows)), [f"{processes[row[0]]}: {names[row]}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds; the black line is one trajectory, from its claim to the commit of its step")
    for name, colour in colours.items():
        axes.broken_barh([(0, 0)], (0, 0), color=colour, label=name)
    axes.legend(ncols=1, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_xlim(0, SHOWN_SECONDS)
    figure.tight_layout()
    figure.savefig(file, dpi=80)


def kind(name: str) -> str:
    """The name by which a slice gets its colour: all turns share a name, as do leases and commits."""
    return name.rpartition(" ")[0] if name.rpartition(" ")[0] in ("turn", "lease", "step") else name


def flows(trace: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The flows of a trace that end with a commit, each in order; the flows with the most events come first."""
    found: dict[int, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            found.setdefault(event["id"], []).append(event)
    committed = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e.get("cat") == "commits"}
    whole = [flow for flow in found.values() if (flow[-1]["pid"], flow[-1]["tid"]) in committed]
    return sorted(whole, key=len, reverse=True)


def main(folder: Path, picture: Path | None = None) -> None:
    """Print the cost of the timeline of a run that has ended."""
    timeline = read_timeline(folder)
    if picture is not None:
        draw(timeline, picture)
    lines = [line for file in (folder / TIMELINE).iterdir() for line in file.read_text().splitlines()]
    events = Counter(json.loads(line)[0] for line in lines if line[0] == "[")
    played = timeline.played
    tools = sum(row[2] for totals in timeline.totals.values() for row in totals.sums if row[1].startswith("tool:"))
    each = costs(max(1, round(tools / max(played, 1))))
    cpu = sum(source.cpu for source in timeline.sources.values())
    other = sum(events.values()) - events[TRAJECTORY]  # each costs as much as a change of state, and has its own push
    seconds = other * each[SPAN] + played * each["played"] + events[TRAJECTORY] * each[TRAJECTORY]
    size = sum(file.stat().st_size for file in (folder / "timeline").iterdir())
    print(json.dumps({name: f"{cost * 1e6:.1f} us" for name, cost in each.items()}))
    print(f"{other} spans and counters, {played} trajectories, {events[TRAJECTORY]} kept: {size / 1e6:.2f} MB")
    print(f"{seconds:.3f} s of {cpu:.1f} CPU s: {seconds / cpu:.2%}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
