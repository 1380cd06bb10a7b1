"""Records the timeline of one process: spans on rows, counters, trajectories; and the time in each state.

    states = States(trace, "engine", "starting")
    states.enter("generating")                    # the span of `starting` is recorded
    states.seconds()                              # {"starting": 31.2, "generating": 0.1}
    trace.take()                                  # the lines since the last call, as JSON

Times are seconds of the process's monotonic clock.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

import msgspec

MAX_EVENTS = 10_000
"""Maximum number of events that a process keeps between two pushes; further events are counted as dropped."""
SHORTEST_SECONDS = 0.001
"""No span is recorded for a state that lasts less than this; its time is still counted."""
LONG_SECONDS = 5.0
"""A state that lasts longer than this is recorded as several spans of about this length. So a killed process loses only
the last span."""

SPAN, COUNTER, TRAJECTORY, TOTALS = "span", "counter", "trajectory", "totals"
"""The kinds of lines; `docs/formats.md` describes each kind."""


class Trace:
    """Records the timeline of one process. It keeps a bounded number of events; several threads may use it."""

    def __init__(self, source: str = "") -> None:
        self._events: deque[tuple[Any, ...]] = deque()
        self._dropped = 0
        self._header: dict[str, Any] = {"from": source, "host": socket.gethostname(), "pid": os.getpid()}
        self._header["wall"] = time.time() - time.monotonic()

    def span(self, row: str, name: str, began: float, ended: float, **detail: Any) -> None:
        """Record an operation with its start and end; spans of one row must not overlap."""
        self.add(SPAN, row, name, round(began, 6), round(ended, 6), detail)

    def counter(self, name: str, values: Mapping[str, float]) -> None:
        """Record the current values of the counters that the chart `name` shows."""
        self.add(COUNTER, name, round(time.monotonic(), 6), dict(values))

    def add(self, *event: Any) -> None:
        """Record one line of the trace; if `MAX_EVENTS` lines are waiting for `take`, only count the line as
        dropped."""
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        else:
            self._dropped += 1

    def take(self) -> bytes:
        """The lines since the last call, after a line that names the process; empty if there are none."""
        lines = [self._events.popleft() for _ in range(len(self._events))]
        if not lines:
            return b""
        header = {**self._header, "dropped": self._dropped, "cpu": round(time.process_time(), 3)}
        return b"".join(msgspec.json.encode(line) + b"\n" for line in (header, *lines))


class States:
    """Tracks the state of an object: records a span for each state, and the seconds by state; safe to use from several
    threads."""

    def __init__(self, trace: Trace, row: str, state: str, now: Callable[[], float] = time.monotonic) -> None:
        self._trace, self._row, self._now = trace, row, now
        self._lock = Lock()
        self._seconds: dict[str, float] = {}
        self._since = self._recorded = now()
        self._detail: dict[str, Any] = {}
        self.state = state

    def enter(self, state: str, **detail: Any) -> None:
        """Enter a new state, or continue the current state; `detail` describes the state."""
        with self._lock:
            if state == self.state:
                self._detail |= detail
                return
            now = self._now()
            self._seconds[self.state] = self._seconds.get(self.state, 0.0) + now - self._since
            self._record(now, SHORTEST_SECONDS)
            self.state, self._since, self._recorded, self._detail = state, now, now, detail

    def seconds(self) -> dict[str, float]:
        """Seconds by state so far, including the current state. If the current state has lasted for long, this call
        also records a span for it up to now."""
        with self._lock:
            now = self._now()
            self._record(now, LONG_SECONDS)
            return {**self._seconds, self.state: self._seconds.get(self.state, 0.0) + now - self._since}

    def _record(self, now: float, shortest: float) -> None:
        if now - self._recorded >= shortest:
            self._trace.span(self._row, self.state, self._recorded, now, **self._detail)
            self._recorded = now
