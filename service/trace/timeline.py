"""A run's timeline as it was recorded, with all times in Unix seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from service.observe.recorder import COUNTER, SPAN, TRAJECTORY
from service.trace.files import Line, Source
from service.types import TrajectoryId


class Span(NamedTuple):
    """A stay in a state, or a call."""

    began: float
    ended: float
    name: str
    detail: dict[str, Any]


class Counter(NamedTuple):
    """Numbers that hold from a time on."""

    owner: str
    at: float
    name: str
    values: dict[str, float]


class Sampled(NamedTuple):
    """A trajectory whose calls were kept."""

    of: TrajectoryId
    owner: str
    env: str
    why: str
    """`sampled` or `slow`."""
    span: Span
    parts: dict[str, float]
    """Seconds by part."""
    calls: list[Span]


TOUCHING = 2e-6
"""Seconds between two spans that are one; times are recorded to 1e-6."""

Row = tuple[str, str]
"""(`role/ident` of the process, the row's name)."""


class Timeline:
    """The events of a run, by what they are."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.sources: dict[str, Source] = {}
        """`role/ident` -> its newest description."""
        self.rows: dict[Row, list[Span]] = defaultdict(list)
        self.counters: list[Counter] = []
        self.trajectories: list[Sampled] = []
        """In the order of their beginning."""
        self.totals: dict[str, tuple[int, int, list[tuple[str, str, int, float, float]]]] = {}
        """Process -> (its trajectories, every how many-th is kept, [environment, part or tool:NAME, number, seconds,
        longest]), over its life."""
        for source, shift, kind, event in lines:
            owner = source["from"]
            self.sources[owner] = source
            if kind == SPAN:
                row, name, began, ended, detail = event
                self.rows[owner, row].append(Span(began + shift, ended + shift, name, detail))
            elif kind == COUNTER:
                name, at, values = event
                self.counters.append(Counter(owner, at + shift, name, values))
            elif kind == TRAJECTORY:
                self.trajectories.append(_sampled(owner, shift, event))
            else:
                played, every, sums = event
                self.totals[f"{owner}/{source['host']}/{source['pid']}"] = (played, every, sums)
        self.rows = {row: _joined(spans) for row, spans in self.rows.items()}
        self.trajectories.sort(key=lambda one: one.span.began)

    def since(self, began: float) -> None:
        """Drop what ended before this Unix time."""
        self.rows = {row: [span for span in spans if span.ended >= began] for row, spans in self.rows.items()}
        self.counters = [counter for counter in self.counters if counter.at >= began]
        self.trajectories = [one for one in self.trajectories if one.span.ended >= began]

    @property
    def ended(self) -> float:
        """The Unix time of the last event."""
        return max((spans[-1].ended for spans in self.rows.values() if spans), default=0.0)


def _joined(spans: list[Span]) -> list[Span]:
    """The spans in order; the parts of a long one, which follow each other, as one."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.began):
        if joined and span.name == joined[-1].name and span.began - joined[-1].ended < TOUCHING:
            joined[-1] = Span(joined[-1].began, span.ended, span.name, span.detail)
        else:
            joined.append(span)
    return joined


def _sampled(owner: str, shift: float, event: tuple[Any, ...]) -> Sampled:
    of, why, env, reason, began, seconds, parts, calls = event
    began, trajectory = began + shift, TrajectoryId(*of)
    spans, turns = [], 0
    for tool, start, end, detail in calls:
        turns += not tool
        name = f"{env}: {tool}" if tool else f"turn {turns}"
        spans.append(Span(began + start, began + end, name, detail))
    ended = max([began + seconds, *(span.ended for span in spans)])
    detail = {"env": env, "ended by": reason, "kept": why, **parts}
    return Sampled(trajectory, owner, env, why, Span(began, ended, str(trajectory), detail), parts, spans)
