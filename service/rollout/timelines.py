"""Where the time of trajectories goes: calls of the engine and of the environment, recorded for a sample.

    with timelines.playing(trajectory, "search"):      # from the claim to the end
        generation = await engine.generate(...)        # a call: queue, prefill, decode, pause
        result = await environment.step(text)          # a call: environment, with the tool's name
    timelines.take()                                   # lines for the timeline: a sample, the slowest, and sums of all

The sample is every n-th trajectory, where n follows from how many end a second. Beside it the slowest of each few
seconds are recorded, so that a bad case is there to look at.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from service.observe.metrics import MAX_SERIES, OTHER, Metrics
from service.observe.recorder import TOTALS, TRAJECTORY, Trace
from service.rollout.engine import Engine, Generation, Sampling
from service.types import Int32s, TrajectoryId

SAMPLED_A_SECOND = 2.0
"""Trajectories a second whose calls are recorded, by all engines of a run together."""
WINDOW_SECONDS = 10.0
"""How often the slowest trajectories are chosen, and the rate of the sample is set."""
SLOWEST = 2
"""Slow trajectories that are recorded of each window beside the sample."""
MAX_CALLS = 256
"""Maximum recorded calls of a trajectory; further ones are in its sums only."""

ENVIRONMENT = "environment"
PARTS = ("queue", "prefill", "decode", "pause", ENVIRONMENT, "other")
"""Parts of a trajectory's time. Where the engine reports no queue and no prefill, they count as `decode`."""


class Call(NamedTuple):
    """One call of the engine or of the environment, as the timeline holds it; times in seconds."""

    tool: str
    """What the environment was asked for; empty: a turn of the engine."""
    began: float
    ended: float
    detail: dict[str, Any]
    """Of the engine: seconds of `queue`, `prefill` and `pause` above 0, and the tokens."""


class Timeline:
    """The times of one trajectory."""

    __slots__ = ("began", "calls", "env", "seconds", "tools")

    def __init__(self, env: str, began: float) -> None:
        self.env, self.began = env, began
        self.calls: list[Call] = []
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.tools: list[tuple[str, float]] = []
        """(tool, seconds) of each call of the environment."""

    def add(self, call: Call, seconds: dict[str, float]) -> None:
        """A call has ended; `seconds` by part."""
        for part, taken in seconds.items():
            self.seconds[part] += taken
        if len(self.calls) < MAX_CALLS:
            self.calls.append(call)


class Ended(NamedTuple):
    """A trajectory that has ended."""

    seconds: float
    number: int
    """Which of the process it is; no two are equal, so that the slowest can be compared."""
    trajectory: TrajectoryId
    line: Timeline
    reason: str

    def event(self, why: str) -> tuple[Any, ...]:
        """Its line in the timeline; `why` it is recorded."""
        calls = [
            (call.tool, round(call.began - self.line.began, 6), round(call.ended - self.line.began, 6), call.detail)
            for call in self.line.calls
        ]
        began, parts = round(self.line.began, 6), {part: round(s, 6) for part, s in self.line.seconds.items() if s}
        return TRAJECTORY, tuple(self.trajectory), why, self.line.env, self.reason, began, self.seconds, parts, calls


class Timelines:
    """The trajectories that one process plays, and where the time of those that ended went."""

    def __init__(self, engines: int = 1) -> None:
        self._a_window = SAMPLED_A_SECOND * WINDOW_SECONDS / engines
        self._open: dict[str, Timeline] = {}
        self._every = 1
        self._played = self._before = 0
        """Trajectories that ended: in all, and before this window."""
        self._window = time.monotonic()
        self._finished = False
        self._sampled: list[Ended] = []
        self._slowest: list[Ended] = []
        self._sums: dict[tuple[str, str], list[float]] = {}
        """(environment, part or tool:NAME) -> number, seconds, longest."""
        self._parts: dict[tuple[str, str], list[float]] = {}
        self._tools: dict[tuple[str, str], list[float]] = {}

    @contextmanager
    def playing(self, trajectory: TrajectoryId, env: str) -> Iterator[Timeline]:
        """A trajectory is played; one that is cancelled is left out."""
        key = str(trajectory)
        line = self._open[key] = Timeline(env, time.monotonic())
        try:
            yield line
        finally:
            if self._open.get(key) is line:  # not where it already continues here after it was moved
                del self._open[key]

    def generated(self, request: str, began: float, generation: Generation) -> None:
        """A call of the engine ended; a request is named `TRAJECTORY/...`."""
        if (line := self._open.get("/".join(request.split("/", 3)[:3]))) is None:  # the trajectory's own name has 3
            return
        seconds = (now := time.monotonic()) - began
        parts = {part: taken for part, taken in generation.seconds.items() if taken > 0}
        decode = max(0.0, seconds - sum(parts.values()))
        detail = {part: round(taken, 6) for part, taken in parts.items()} | {"tokens": len(generation.token_ids)}
        line.add(Call("", began, now, detail), parts | {"decode": decode})

    def answered(self, trajectory: TrajectoryId, tool: str, began: float) -> None:
        """A call of the environment ended."""
        if (line := self._open.get(str(trajectory))) is not None:
            seconds = (now := time.monotonic()) - began
            line.tools.append((tool, seconds))
            line.add(Call(tool, began, now, {}), {ENVIRONMENT: seconds})

    def ended(self, trajectory: TrajectoryId, line: Timeline, reason: str) -> None:
        """A trajectory has ended for this reason."""
        seconds = time.monotonic() - line.began
        line.seconds["other"] = max(0.0, seconds - sum(line.seconds.values()))
        self._played += 1
        ended = Ended(round(seconds, 6), self._played, trajectory, line, reason)
        if self._played % self._every == 0:
            self._sampled.append(ended)
        else:
            heapq.heappush(self._slowest, ended)
            if len(self._slowest) > SLOWEST:
                heapq.heappop(self._slowest)
        for part, taken in line.seconds.items():
            self._count(line.env, part, taken)
            self._parts.setdefault((line.env, part), []).append(taken)
        for tool, taken in line.tools:
            name = self._count(line.env, f"tool:{tool}", taken)
            self._tools.setdefault((line.env, name.removeprefix("tool:")), []).append(taken)

    def _count(self, env: str, name: str, seconds: float) -> str:
        """Add to the sums; returns the name under which it was counted."""
        if (env, name) not in self._sums and len(self._sums) >= MAX_SERIES:
            name = OTHER
        counted = self._sums.setdefault((env, name), [0, 0.0, 0.0])
        counted[0] += 1
        counted[1] += seconds
        counted[2] = max(counted[2], seconds)
        return name

    def measure(self, metrics: Metrics) -> None:
        """Observe the times of the trajectories that ended since the last call."""
        for (env, part), seconds in self._parts.items():
            metrics.observe("baton_trajectory_seconds", np.asarray(seconds), env=env, part=part)
        for (env, tool), seconds in self._tools.items():
            metrics.observe("baton_tool_seconds", np.asarray(seconds), env=env, tool=tool)
        self._parts.clear()
        self._tools.clear()

    def finish(self) -> None:
        """No more are played: what the last window has is put into the timeline at the next `record`."""
        self._finished = True

    def record(self, trace: Trace) -> None:
        """Put the sample since the last call into the timeline, and once a window the slowest and the sums."""
        for ended in self._sampled:
            trace.add(*ended.event("sampled"))
        self._sampled.clear()
        if (past := time.monotonic() - self._window) < WINDOW_SECONDS and not self._finished:
            return
        for ended in self._slowest:
            trace.add(*ended.event("slow"))
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
    """An engine whose calls are timed, and counted while they run."""

    def __init__(self, engine: Engine, timelines: Timelines) -> None:
        self._engine, self._timelines = engine, timelines

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        """As the engine does."""
        began = time.monotonic()
        generation = await self._engine.generate(prompt_ids, sampling, request_id)
        self._timelines.generated(request_id, began, generation)
        return generation
