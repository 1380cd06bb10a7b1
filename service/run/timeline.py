"""Writes and reads a run's timeline: the files `timeline/000001.jsonl` and so on, each of bounded size.

    {"from": "generator/generator-0", "wall": ..}        the process of the next lines; a time + `wall` is Unix time
    ["span", "engine", "generating", 812.1, 812.5, {}]   an event, here a state with the times of its beginning and end

Times of different hosts are comparable only as far as the wall clocks of the hosts agree.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from itertools import count
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, TypedDict

import msgspec
from msgspec import Struct

from service.errors import UserError
from service.observe.recorder import COUNTER, SPAN, TOTALS, TRAJECTORY
from service.run.folder import TIMELINE, refuse_larger
from service.types import TrajectoryId

log = logging.getLogger(__name__)

FILE_BYTES = 4 << 20
FILES = 8
"""Maximum number of timeline files; older files are deleted."""
TOUCHING = 2e-6
"""Seconds between two spans up to which they are joined into one span; times are recorded to 1e-6 s."""
SLOW = "slow"
"""Marks a trajectory that was recorded because it was slow, not as part of the sample; quantiles leave it out, because
it would distort them."""

Number = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
"""A time or duration in seconds."""
Whole = Annotated[int, msgspec.Meta(ge=-(10**11), le=10**11)]
Numbers = dict[str, Whole | Number]
Row = tuple[str, str]
"""A row of the timeline: the process as `role/ident`, and the name of the row."""


class TimelineFiles:
    """Writes the files of the timeline, from the lines that the processes of a run send to the driver's hub."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._numbers = count(1 + max((_number(file) for file in folder.glob("*.jsonl")), default=0))

    def append(self, lines: bytes) -> None:
        """Append complete lines. If the disk is full the lines are lost, and the log says so."""
        try:
            if self._file is None or self._file.tell() >= FILE_BYTES:
                self._file = self._next()
            self._file.write(lines)
            self._file.flush()
        except OSError as error:
            log.warning("the timeline lacks %d bytes: %s", len(lines), error)

    def close(self) -> None:
        """Close the open file; the next lines begin a new file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next(self) -> BinaryIO:
        self.close()
        self._folder.mkdir(exist_ok=True)
        number = next(self._numbers)
        for old in self._folder.glob("*.jsonl"):
            if _number(old) <= number - FILES:
                old.unlink()
        return (self._folder / f"{number:06}.jsonl").open("ab")


def _number(file: Path) -> int:
    return int(file.stem) if file.stem.isdecimal() else 0


class Process(Struct, rename={"owner": "from"}):
    """The process that wrote the lines that follow, and its clock."""

    owner: str
    """The process as `role/ident`."""
    host: str
    pid: int
    wall: Number
    """Seconds to add to the process's monotonic clock to get Unix time."""
    dropped: int
    cpu: Number = 0.0


class _SpanLine(Struct, array_like=True, tag=SPAN):
    row: str
    name: str
    began: Number
    ended: Number
    detail: dict[str, str | Whole | Number | list[int] | None]

    def __post_init__(self) -> None:
        _refuse_backwards(self.began, self.ended)
        if self.row in _DETAILS:
            msgspec.convert(self.detail, _DETAILS[self.row])


class Counter(Struct, array_like=True, tag=COUNTER):
    """The values of several counters of one process; they hold from the time `at` until the next values."""

    name: str
    at: Number
    values: Numbers


class _TrajectoryLine(Struct, array_like=True, tag=TRAJECTORY):
    of: tuple[int, int, int]
    why: str
    env: str
    reason: str
    began: Number
    seconds: Number
    parts: Numbers
    calls: list[tuple[str, Number, Number, Numbers]]

    def __post_init__(self) -> None:
        _refuse_backwards(0.0, self.seconds)
        for _, began, ended, _ in self.calls:
            _refuse_backwards(began, ended)


class Totals(Struct, array_like=True, tag=TOTALS):
    """Numbers and times of all trajectories that one process has played since it started."""

    played: int
    """Number of trajectories that the process has played."""
    every: int
    """The sampling interval: one of this many trajectories is recorded."""
    sums: list[tuple[str, str, int, Number, Number]]
    """Sums as tuples (environment, part or tool:NAME, number of calls, total seconds, seconds of the longest call)."""


class _Lease(TypedDict):
    lease: int
    groups: list[int]


class _Commit(TypedDict):
    lease: int


_DETAILS: dict[str, Any] = {"leases": _Lease, "commits": _Commit}
"""Types of the details of spans, by row."""


def _refuse_backwards(began: float, ended: float) -> None:
    if ended < began:
        raise ValueError("it ends before it begins")


class Span(NamedTuple):
    """A period with a beginning and an end in Unix seconds: a state of a process, or a call."""

    began: float
    ended: float
    name: str
    detail: dict[str, Any]

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.ended - self.began


class Sampled(NamedTuple):
    """A trajectory whose calls were recorded in the timeline."""

    of: TrajectoryId
    owner: str
    env: str
    why: str
    """Why the trajectory was recorded: `sampled` or `slow`."""
    span: Span
    parts: dict[str, float]
    """Seconds of the trajectory by part."""
    calls: list[Span]


class RunTimeline:
    """The events of a run's timeline, with all times in Unix seconds. Files are added one by one."""

    def __init__(self) -> None:
        self.sources: dict[str, Process] = {}
        """The newest description of each process, by `role/ident`."""
        self.rows: dict[Row, list[Span]] = defaultdict(list)
        self.counters: list[tuple[str, Counter]] = []
        """Counters, each with the `role/ident` of its process."""
        self.trajectories: list[Sampled] = []
        """Recorded trajectories in the order of their beginning."""
        self.totals: dict[str, Totals] = {}
        """The sums of each process, by `role/ident`."""

    def read(self, file: Path) -> None:
        """Add the events of a timeline file; a line that was cut off when its writer was killed is skipped."""
        lines = [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        source: Process | None = None
        for line in lines:
            if line.startswith(b"{"):
                source = _PROCESSES.decode(line)
            elif source is None:
                raise ValueError("an event of no process")
            else:
                self._add(source, _EVENTS.decode(line))

    def _add(self, source: Process, event: _SpanLine | Counter | _TrajectoryLine | Totals) -> None:
        owner, shift = source.owner, source.wall
        self.sources[owner] = source
        if isinstance(event, _SpanLine):
            span = Span(event.began + shift, event.ended + shift, event.name, event.detail)
            self.rows[owner, event.row].append(span)
        elif isinstance(event, Counter):
            event.at += shift
            self.counters.append((owner, event))
        elif isinstance(event, _TrajectoryLine):
            self.trajectories.append(_sampled(owner, shift, event))
        else:
            self.totals[f"{owner}/{source.host}/{source.pid}"] = event

    def since(self, began: float) -> None:
        """Drop all events that ended before the Unix time `began`."""
        self.rows = {row: [span for span in spans if span.ended >= began] for row, spans in self.rows.items()}
        self.counters = [(owner, counter) for owner, counter in self.counters if counter.at >= began]
        self.trajectories = [one for one in self.trajectories if one.span.ended >= began]

    @property
    def ended(self) -> float:
        """The Unix time of the last event."""
        return max((spans[-1].ended for spans in self.rows.values() if spans), default=0.0)

    @property
    def played(self) -> int:
        """Number of trajectories that ended, whether they were recorded or not."""
        return max(sum(totals.played for totals in self.totals.values()), len(self.trajectories))


_PROCESSES = msgspec.json.Decoder(Process)
_EVENTS = msgspec.json.Decoder(_SpanLine | Counter | _TrajectoryLine | Totals)


def read_timeline(folder: Path) -> RunTimeline:
    """Read the timeline of a run from the run's folder.

    Raises:
        UserError: the run kept no timeline, or another version of Baton wrote it.
    """
    files = sorted(file for file in (folder / TIMELINE).glob("*.jsonl") if file.is_file())
    if not files:
        raise UserError(f"{folder / TIMELINE}: this run has kept no timeline")
    refuse_larger(files, 2 * FILES * FILE_BYTES)
    timeline = RunTimeline()
    for file in files:
        try:
            timeline.read(file)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}: its timeline is not one of this version of Baton ({error!r:.200})") from None
    timeline.rows = {row: _joined(spans) for row, spans in timeline.rows.items()}
    timeline.trajectories.sort(key=lambda one: one.span.began)
    return timeline


def _joined(spans: list[Span]) -> list[Span]:
    """The spans in order of time; consecutive parts of a long span are joined."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.began):
        if joined and span.name == joined[-1].name and span.began - joined[-1].ended < TOUCHING:
            joined[-1] = Span(joined[-1].began, span.ended, span.name, span.detail)
        else:
            joined.append(span)
    return joined


def _sampled(owner: str, shift: float, event: _TrajectoryLine) -> Sampled:
    began, trajectory = event.began + shift, TrajectoryId(*event.of)
    spans, turns = [], 0
    for tool, start, end, about in event.calls:
        turns += not tool
        name = f"{event.env}: {tool}" if tool else f"turn {turns}"
        spans.append(Span(began + start, began + end, name, about))
    ended = max([began + event.seconds, *(span.ended for span in spans)])
    detail: dict[str, Any] = {"env": event.env, "ended by": event.reason, "kept": event.why, **event.parts}
    whole = Span(began, ended, str(trajectory), detail)
    return Sampled(trajectory, owner, event.env, event.why, whole, event.parts, spans)
