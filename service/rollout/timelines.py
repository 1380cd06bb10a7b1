"""Records where trajectories spend their time: the calls of engine and environment, for a sample of trajectories.

    with timelines.playing(trajectory, "search"):      # from the claim to the end
        generation = await engine.generate(...)        # a call: queue, prefill, decode, pause
        result = await environment.step(text)          # a call: environment, with the tool's name
    timelines.record(trace)                            # to the timeline: a sample, the slowest, and sums of all

The sample is every n-th trajectory; n grows with the number of trajectories that end per second. In addition, the
slowest trajectories of each time window are recorded, so that bad cases can be inspected.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from service.observe.metrics import MAX_SERIES, OTHER, Metrics
from service.observe.recorder import TOTALS, TRAJECTORY, Trace
from service.rollout.engine import Engine, Generation, Sampling
from service.types import Int32s, TrajectoryId

SAMPLED_A_SECOND = 2.0
"""Number of trajectories per second that are sampled, over all engines of a run."""
WINDOW_SECONDS = 10.0
"""Length of a time window. At its end the slowest trajectories are recorded, and the sampling rate is set."""
SLOWEST = 2
"""Number of slow trajectories that are recorded per time window in addition to the sample."""
MAX_CALLS = 256
"""Maximum number of recorded calls of a trajectory; later calls are only added to the trajectory's sums."""

ENVIRONMENT = "environment"
PARTS = ("queue", "prefill", "decode", "pause", ENVIRONMENT, "other")
"""Parts of a trajectory's time. Where the engine does not report `queue` and `prefill`, their time counts as
`decode`."""


class Timeline:
    """One trajectory: when it began, each call of the engine and of the environment, and how its time is divided."""

    def __init__(self, trajectory: TrajectoryId, env: str) -> None:
        self.trajectory, self.env, self.began = trajectory, env, time.monotonic()
        self.calls: list[tuple[str, float, float, dict[str, Any]]] = []
        """(tool, seconds from `began` to the start and to the end, detail) of each call. The tool is empty for a call
        of the engine; then the detail has the number of tokens, and those seconds of `queue`, `prefill` and `pause`
        that are above 0."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.tools: list[tuple[str, float]] = []
        """(tool, seconds) of each call of the environment."""
        self.lasted, self.reason = 0.0, ""
        """Seconds from `began` to the trajectory's end, and why it ended."""

    def add(self, tool: str, began: float, ended: float, parts: dict[str, float], detail: dict[str, Any]) -> None:
        """Record a call that has returned. `parts`: for each of `PARTS`, the seconds that the call adds to it."""
        for part, taken in parts.items():
            self.seconds[part] += taken
        if len(self.calls) < MAX_CALLS:
            self.calls.append((tool, round(began - self.began, 6), round(ended - self.began, 6), detail))

    def event(self, why: str) -> tuple[Any, ...]:
        """The trajectory as an event for the run's timeline. `why`: the reason for recording it, `sampled` or
        `slow`."""
        began, parts = round(self.began, 6), {part: round(s, 6) for part, s in self.seconds.items() if s}
        of = tuple(self.trajectory), why, self.env, self.reason, began, self.lasted, parts, self.calls
        return TRAJECTORY, *of


class Timelines:
    """Collects the timelines of the trajectories that one process plays, and sums of the times of all its
    trajectories."""

    def __init__(self, engines: int = 1) -> None:
        self._a_window = SAMPLED_A_SECOND * WINDOW_SECONDS / engines
        self._open: dict[str, Timeline] = {}
        self._every = 1
        self._played = self._before = 0
        """Number of trajectories that ended: in total, and before this window."""
        self._window = time.monotonic()
        self._finished = False
        self._sampled: list[Timeline] = []
        self._slowest: list[tuple[float, int, Timeline]] = []
        """A heap of (seconds, number among the trajectories of this process, trajectory)."""
        self._sums: dict[tuple[str, str], list[float]] = {}
        """For each (environment, part or tool:NAME): the number of calls, their total seconds, and the seconds of the
        longest."""
        self._parts: dict[tuple[str, str], list[float]] = {}
        self._tools: dict[tuple[str, str], list[float]] = {}

    @contextmanager
    def playing(self, trajectory: TrajectoryId, env: str) -> Iterator[Timeline]:
        """Within the block, record the calls of a trajectory; a cancelled trajectory is left out of the results."""
        key = str(trajectory)
        line = self._open[key] = Timeline(trajectory, env)
        try:
            yield line
        finally:
            if self._open.get(key) is line:  # unless the trajectory was moved away and already continues here
                del self._open[key]

    def generated(self, request: str, began: float, generation: Generation) -> None:
        """Record an engine call that has returned. `request`: the id of the request, which begins with the trajectory's
        name and a slash."""
        if (line := self._open.get("/".join(request.split("/", 3)[:3]))) is None:  # the trajectory's name has 3 parts
            return
        seconds = (now := time.monotonic()) - began
        parts = {part: taken for part, taken in generation.seconds.items() if taken > 0}
        decode = max(0.0, seconds - sum(parts.values()))
        detail = {part: round(taken, 6) for part, taken in parts.items()} | {"tokens": len(generation.token_ids)}
        line.add("", began, now, parts | {"decode": decode}, detail)

    def answered(self, trajectory: TrajectoryId, tool: str, began: float) -> None:
        """Record a call of the environment that has returned. `tool`: the tool that was called, or the called method;
        `began`: when the call began."""
        if (line := self._open.get(str(trajectory))) is not None:
            seconds = (now := time.monotonic()) - began
            line.tools.append((tool, seconds))
            line.add(tool, began, now, {ENVIRONMENT: seconds}, {})

    def ended(self, line: Timeline, reason: str) -> None:
        """Record that a trajectory has ended. `reason`: why it ended."""
        seconds = time.monotonic() - line.began
        line.seconds["other"] = max(0.0, seconds - sum(line.seconds.values()))
        self._played += 1
        line.lasted, line.reason = round(seconds, 6), reason
        if self._played % self._every == 0:
            self._sampled.append(line)
        else:
            heapq.heappush(self._slowest, (seconds, self._played, line))
            if len(self._slowest) > SLOWEST:
                heapq.heappop(self._slowest)
        for part, taken in line.seconds.items():
            self._count(line.env, part, taken)
            self._parts.setdefault((line.env, part), []).append(taken)
        for tool, taken in line.tools:
            name = self._count(line.env, f"tool:{tool}", taken)
            self._tools.setdefault((line.env, name.removeprefix("tool:")), []).append(taken)

    def _count(self, env: str, name: str, seconds: float) -> str:
        """Add to the sums; returns the name under which the seconds were counted."""
        if (env, name) not in self._sums and len(self._sums) >= MAX_SERIES:
            name = OTHER
        counted = self._sums.setdefault((env, name), [0, 0.0, 0.0])
        counted[0] += 1
        counted[1] += seconds
        counted[2] = max(counted[2], seconds)
        return name

    def measure(self, metrics: Metrics) -> None:
        """Record metrics of the trajectories that ended since the last call: for each of `PARTS` the seconds that they
        took, and the seconds of each tool's calls."""
        for (env, part), seconds in self._parts.items():
            metrics.observe("baton_trajectory_seconds", np.asarray(seconds), env=env, part=part)
        for (env, tool), seconds in self._tools.items():
            metrics.observe("baton_tool_seconds", np.asarray(seconds), env=env, tool=tool)
        self._parts.clear()
        self._tools.clear()

    def finish(self) -> None:
        """End the last time window early, so that the next `record` writes its data to the timeline."""
        self._finished = True

    def record(self, trace: Trace) -> None:
        """Write to `trace` the sampled trajectories that ended since the last call of `record`. At the end of each time
        window, also write the slowest trajectories of the window, and the sums over all trajectories."""
        for line in self._sampled:
            trace.add(*line.event("sampled"))
        self._sampled.clear()
        if (past := time.monotonic() - self._window) < WINDOW_SECONDS and not self._finished:
            return
        for _, _, line in self._slowest:
            trace.add(*line.event("slow"))
        self._slowest.clear()
        if not self._finished:
            self._every = max(1, math.ceil((self._played - self._before) * WINDOW_SECONDS / past / self._a_window))
        self._before, self._window = self._played, time.monotonic()
        if self._sums:
            sums = [
                (env, name, int(n), round(s, 6), round(most, 6)) for (env, name), (n, s, most) in self._sums.items()
            ]
            trace.add(TOTALS, self._played, self._every, sums)


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
