"""What recording the timeline costs: time per event, times the events of a run, over the run's CPU seconds.

    python -m benchmarks.timeline runs/quickstart

The CPU seconds are those of Baton's own processes, without vLLM's core, whose work would make the share smaller.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from service.observe.trace.files import read_trace
from service.observe.trace.recorder import SPAN, TRAJECTORY, States, Trace
from service.observe.trace.timeline import Timeline
from service.observe.trace.trajectories import Timelines
from service.rollout.engine import Generation
from service.types import TrajectoryId

ROUNDS = 2000


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
    """Seconds of a span with its state's change, of a trajectory with so many calls, and of one that is kept."""
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
            timelines.ended(of, line, "stop")
        timelines._sampled.clear()
        timelines._parts.clear()
        timelines._tools.clear()

    played = seconds_each(trajectory)
    of = TrajectoryId(7, 3)
    with timelines.playing(of, "lookup") as line:
        for _ in range(calls):
            timelines.generated(f"{of}/turn=1", time.monotonic(), generation)
            timelines.answered(of, "step", time.monotonic())
        timelines.ended(of, line, "stop")
    (ended,) = timelines._sampled

    def keep() -> None:
        trace.add(*ended.event("sampled"))
        trace.take()

    return {SPAN: seconds_each(span), "played": played, TRAJECTORY: seconds_each(keep)}


def main(folder: Path) -> None:
    """Print the cost of the timeline of a run that has ended."""
    timeline = Timeline(read_trace(folder))
    events = Counter(line.event[0] for line in read_trace(folder))
    played = sum(played for played, _, _ in timeline.totals.values())
    tools = sum(row[2] for _, _, sums in timeline.totals.values() for row in sums if row[1].startswith("tool:"))
    each = costs(max(1, round(tools / max(played, 1))))
    cpu = sum(source["cpu"] for source in timeline.sources.values())
    other = sum(events.values()) - events[TRAJECTORY]  # each as expensive as a state's change, and alone in its push
    seconds = other * each[SPAN] + played * each["played"] + events[TRAJECTORY] * each[TRAJECTORY]
    size = sum(file.stat().st_size for file in (folder / "timeline").iterdir())
    print(json.dumps({name: f"{cost * 1e6:.1f} us" for name, cost in each.items()}))
    print(f"{other} spans and counters, {played} trajectories, {events[TRAJECTORY]} kept: {size / 1e6:.2f} MB")
    print(f"{seconds:.3f} s of {cpu:.1f} CPU s: {seconds / cpu:.2%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
