"""Records the timeline of one process as Chrome trace events (spans on rows, and counters), and the time in each state.

    states = States(trace, "engine", "starting")
    states.enter("generating")                    # the span of `starting` is recorded
    states.seconds()                              # {"starting": 31.2, "generating": 0.1}
    trace.take()                                  # the events since the last call, one JSON object per line

Callers give times in seconds of the process's monotonic clock; events have Unix time in microseconds. Format: the Trace
Event Format of Chromium.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any
from zlib import crc32

import msgspec

MAX_EVENTS = 10_000
"""Maximum number of events that a process keeps between two pushes; further events are counted as dropped."""
SHORTEST_SECONDS = 0.001
"""No span is recorded for a state that lasts less than this; its time is still counted."""
LONG_SECONDS = 5.0
"""A longer state is recorded as several spans of about this length, so that a killed process loses only the last
span."""
ORDER = ("driver", "trainer", "generator", "buffer")
"""Roles of processes, in the order from top to bottom of the timeline."""


class Trace:
    """Records the timeline of one process. It keeps a bounded number of events; several threads may use it."""

    def __init__(self, source: str = "") -> None:
        """`source`: the process as `role/ident`; all events of a source, also of a restarted process, are shown
        together."""
        self._events: deque[dict[str, Any]] = deque()
        self._dropped = 0
        self._rows: dict[str, int] = {}
        """Number of each row."""
        self._wall = time.time() - time.monotonic()
        self._pid = crc32(source.encode()) >> 1
        role, _, ident = source.partition("/")
        place = ORDER.index(role) if role in ORDER else len(ORDER)
        self._about = {
            "process_name": {"name": f"{ident} on {socket.gethostname()}, process {os.getpid()}"},
            "process_sort_index": {"sort_index": place},
        }

    def span(self, row: str, name: str, began: float, ended: float, **detail: Any) -> None:
        """Record an operation with its start and end. Two spans of a row must not overlap, unless one contains the
        other."""
        times = {"ts": self._microseconds(began), "dur": round((ended - began) * 1e6)}
        tid = self._rows.setdefault(row, len(self._rows) + 1)
        self._add({"ph": "X", "name": name, "cat": row, **times, "tid": tid, "args": detail})

    def counter(self, name: str, values: Mapping[str, float]) -> None:
        """Record the current values of the counters that the chart `name` shows."""
        self._add({"ph": "C", "name": name, "ts": self._microseconds(time.monotonic()), "args": dict(values)})

    def take(self) -> bytes:
        """The events since the last call, one per line; empty if there are none. The first lines name the process and
        its rows in the timeline."""
        events = [self._events.popleft() for _ in range(len(self._events))]
        if not events:
            return b""
        lines = (msgspec.json.encode({**event, "pid": self._pid}) for event in (*self._names(), *events))
        return b"".join(line + b"\n" for line in lines)

    def _names(self) -> Iterator[dict[str, Any]]:
        for name, args in self._about.items():
            yield {"ph": "M", "name": name, "args": args}
        if self._dropped:
            labels = f"{self._dropped} events were not recorded"
            yield {"ph": "M", "name": "process_labels", "args": {"labels": labels}}
        for row, tid in self._rows.items():
            yield {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": row}}

    def _add(self, event: dict[str, Any]) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        else:
            self._dropped += 1

    def _microseconds(self, at: float) -> int:
        return round((at + self._wall) * 1e6)


class States:
    """Tracks the state of an object: records a span for each state, and sums the seconds by state. Several threads may
    use it."""

    def __init__(self, trace: Trace, row: str, state: str) -> None:
        self._trace, self._row = trace, row
        self._lock = Lock()
        self._seconds: dict[str, float] = {}
        self._since = self._recorded = time.monotonic()
        self._detail: dict[str, Any] = {}
        self.state = state

    def enter(self, state: str, **detail: Any) -> None:
        """Enter a new state, or continue the current state; `detail` describes the state."""
        with self._lock:
            if state == self.state:
                self._detail |= detail
                return
            now = time.monotonic()
            self._seconds[self.state] = self._seconds.get(self.state, 0.0) + now - self._since
            self._record(now, SHORTEST_SECONDS)
            self.state, self._since, self._recorded, self._detail = state, now, now, detail

    def seconds(self) -> dict[str, float]:
        """Seconds by state so far, including the current state. If the current state has lasted for long, this call
        also records a span for it up to now."""
        with self._lock:
            now = time.monotonic()
            self._record(now, LONG_SECONDS)
            return {**self._seconds, self.state: self._seconds.get(self.state, 0.0) + now - self._since}

    def _record(self, now: float, shortest: float) -> None:
        if now - self._recorded >= shortest:
            self._trace.span(self._row, self.state, self._recorded, now, **self._detail)
            self._recorded = now
