"""Records where trajectories spend their time: metrics get the seconds of each part, the timeline gets a sample.

with timelines.playing(trajectory, "search"):      # from the claim to the end
    generation = await engine.generate(...)        # a call: queue, prefill, decode, pause
    result = await environment.step(text)          # a call: environment, with the tool's name
timelines.record(trace)                            # the sampled trajectories that ended, with their calls
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from service.observe.metrics import Metrics
from service.observe.recorder import Trace
from service.rollout.engine import Engine, Generation, Sampling
from service.types import Int32s, TrajectoryId

SAMPLED_A_SECOND = 2.0
"""Maximum number of trajectories per second that are sampled, over all engines of a run."""
SAMPLED_AT_ONCE = 8
"""Maximum number of trajectories that a process samples at the same time; each has its own row in the timeline."""
MAX_CALLS = 256
"""Maximum number of recorded calls of a trajectory. Of later calls, only the seconds are counted."""

ENVIRONMENT = "environment"
PARTS = ("queue", "prefill", "decode", "pause", ENVIRONMENT, "other")
"""Parts of a trajectory's time. If the engine does not report `queue` and `prefill`, their time counts as `decode`."""


class TimedCall(NamedTuple):
    """A call of the engine or of the environment, with times of the monotonic clock."""

    began: float
    ended: float
    tool: str
    """For a call of the environment: the tool, or else the method; for a call of the engine: empty."""
    detail: dict[str, Any]


class Timeline:
    """The times of one trajectory: its beginning, its calls, and the seconds of each part."""

    def __init__(self, trajectory: TrajectoryId, env: str, row: int | None) -> None:
        """`row`: the number of its row in the timeline; None: it is not in the sample."""
        self.trajectory, self.env, self.row, self.began = trajectory, env, row, time.monotonic()
        self.ended, self.reason = self.began, ""
        self.calls: list[TimedCall] = []
        """The calls that have returned; empty if the trajectory is not in the sample."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.tools: list[tuple[str, float]] = []
        """(tool, seconds) of each call of the environment."""

    def add(self, call: TimedCall, parts: dict[str, float]) -> None:
        """Record a call that has returned. `parts`: the seconds that the call adds to each part."""
        for part, taken in parts.items():
            self.seconds[part] += taken
        if self.row is not None and len(self.calls) < MAX_CALLS:
            self.calls.append(call)

    def record(self, trace: Trace) -> None:
        """Record the trajectory and its calls in the timeline; calls at the same time are on different rows."""
        parts = {part: round(seconds, 6) for part, seconds in self.seconds.items() if seconds}
        about = {"env": self.env, "ended by": self.reason, **parts}
        row, turns, ends = f"trajectories {self.row}", 0, [self.began]
        trace.span(row, str(self.trajectory), self.began, self.ended, **about)
        for began, ended, tool, detail in sorted(self.calls, key=lambda call: call.began):
            turns += not tool
            beside = next((n for n, end in enumerate(ends) if end <= began), len(ends))
            ends[beside : beside + 1] = [ended]
            name = f"{self.env}: {tool}" if tool else f"turn {turns}"
            trace.span(f"{row}, call {beside}" if beside else row, name, began, min(ended, self.ended), **detail)


class Timelines:
    """Measures the trajectories that one process plays, and collects a sample for the timeline: one trajectory every
    `engines / SAMPLED_A_SECOND` seconds, at most `SAMPLED_AT_ONCE` at a time."""

    def __init__(self, engines: int = 1) -> None:
        self._pause = engines / SAMPLED_A_SECOND
        self._next_sample = 0.0
        self._rows: list[int] = [*range(SAMPLED_AT_ONCE, 0, -1)]
        """Rows that are free; the lowest number is last."""
        self._open: dict[str, Timeline] = {}
        self._sampled: list[Timeline] = []
        """Sampled trajectories that ended."""
        self._parts: dict[tuple[str, str], list[float]] = {}
        """(environment, part) -> the seconds of each trajectory since the last call of `measure`."""
        self._tools: dict[tuple[str, str], list[float]] = {}

    @contextmanager
    def playing(self, trajectory: TrajectoryId, env: str) -> Iterator[Timeline]:
        """Within the block, record the calls of a trajectory. A cancelled trajectory is not recorded."""
        key, now, row = str(trajectory), time.monotonic(), None
        if now >= self._next_sample and self._rows:
            self._next_sample, row = now + self._pause, self._rows.pop()
        line = self._open[key] = Timeline(trajectory, env, row)
        try:
            yield line
        finally:
            if line.row is not None:
                self._rows = sorted([*self._rows, line.row], reverse=True)
            if self._open.get(key) is line:  # else it was begun again meanwhile
                del self._open[key]

    def generated(self, request: str, began: float, generation: Generation) -> None:
        """Record an engine call that has returned. `request`: the id of the request, which begins with the trajectory's
        name and a slash."""
        if (line := self._open.get("/".join(request.split("/", 3)[:3]))) is None:  # the trajectory's name has 3 parts
            return
        now = time.monotonic()
        parts = {part: taken for part, taken in generation.seconds.items() if taken > 0}
        detail = {part: round(taken, 6) for part, taken in parts.items()} | {"tokens": len(generation.token_ids)}
        decode = max(0.0, now - began - sum(parts.values()))
        line.add(TimedCall(began, now, "", detail), parts | {"decode": decode})

    def answered(self, trajectory: TrajectoryId, tool: str, began: float) -> None:
        """Record a call of the environment that has returned. `tool`: the tool that was called, or the called method;
        `began`: when the call began."""
        if (line := self._open.get(str(trajectory))) is not None:
            now = time.monotonic()
            line.tools.append((tool, now - began))
            line.add(TimedCall(began, now, tool, {}), {ENVIRONMENT: now - began})

    def ended(self, line: Timeline, reason: str) -> None:
        """Record that a trajectory has ended. `reason`: why it ended."""
        line.ended, line.reason = time.monotonic(), reason
        line.seconds["other"] = max(0.0, line.ended - line.began - sum(line.seconds.values()))
        if line.row is not None:
            self._sampled.append(line)
        for part, taken in line.seconds.items():
            self._parts.setdefault((line.env, part), []).append(taken)
        for tool, taken in line.tools:
            self._tools.setdefault((line.env, tool), []).append(taken)

    def measure(self, metrics: Metrics) -> None:
        """Record metrics of the trajectories that ended since the last call: the seconds of each part of `PARTS`, and
        the seconds of each tool's calls."""
        for (env, part), seconds in self._parts.items():
            metrics.observe("baton_trajectory_seconds", np.asarray(seconds), env=env, part=part)
        for (env, tool), seconds in self._tools.items():
            metrics.observe("baton_tool_seconds", np.asarray(seconds), env=env, tool=tool)
        self._parts.clear()
        self._tools.clear()

    def record(self, trace: Trace) -> None:
        """Write the sampled trajectories that ended since the last call to `trace`."""
        for line in self._sampled:
            line.record(trace)
        self._sampled.clear()


class TimedEngine:
    """An inference engine whose calls are timed."""

    def __init__(self, engine: Engine, timelines: Timelines) -> None:
        self._engine, self._timelines = engine, timelines

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        """Call the engine's `generate`, and record how long the call took."""
        began = time.monotonic()
        generation = await self._engine.generate(prompt_ids, sampling, request_id)
        self._timelines.generated(request_id, began, generation)
        return generation
