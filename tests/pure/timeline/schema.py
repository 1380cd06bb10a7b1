"""What the Trace Event Format asks of a file, and what holds of a run's timeline."""

from collections import defaultdict
from typing import Any

KEYS = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "C": {"name", "ts", "pid", "args"},
    "M": {"name", "pid", "args"},
}
"""Event kinds -> the keys that a viewer needs."""
ROUNDING = 2
"""Microseconds; times are written to a microsecond."""


def check_trace(trace: dict[str, Any]) -> None:
    """Raises `AssertionError` where the trace is none, or a row overlaps itself."""
    rows = defaultdict(list)
    named = {(event["pid"], event.get("tid")) for event in trace["traceEvents"] if event["ph"] == "M"}
    for event in trace["traceEvents"]:
        assert event.keys() >= KEYS[event["ph"]], event
        assert all(event.get(key, 0) >= 0 for key in ("ts", "dur")), event
        assert (event["pid"], event.get("tid")) in named, event
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
    for spans in rows.values():
        check_nested(spans)


def check_nested(spans: list[tuple[int, int]]) -> None:
    """A slice ends before the next one of its row begins, or holds it whole."""
    open_ones: list[int] = []
    for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ones and open_ones[-1] <= began + ROUNDING:
            open_ones.pop()
        assert not open_ones or ended <= open_ones[-1] + ROUNDING, (began, ended, open_ones)
        open_ones.append(ended)


def seconds_named(trace: dict[str, Any], row: str, name: str) -> float:
    """The seconds of all slices of this name on rows of this name."""
    slices = (event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == row)
    return float(sum(event["dur"] for event in slices if event["name"] == name) / 1e6)
