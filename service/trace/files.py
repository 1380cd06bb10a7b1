"""The files of a run's timeline: `timeline/000001.jsonl` and so on, each of bounded size, the oldest deleted.

    {"hub": ..}                                    first line of a file: the clock to which all are aligned
    {"from": "generator/generator-0", "offset": ..} whose the next lines are, and how far that clock is from the hub's
    ["span", "engine", "generating", 812.1, 812.5, {}]

All processes of a host have one monotonic clock. A process on another host measures the distance of its clock to the
hub's with the round trip of its pushes, and half of the shortest round trip bounds the error.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, TypedDict

import msgspec

from service.errors import UserError
from service.observe.recorder import COUNTER, SPAN, TOTALS, TRAJECTORY, boot
from service.run.folder import TIMELINE, read_lines

log = logging.getLogger(__name__)

FILE_BYTES = 4 << 20
FILES = 8
"""Files that are kept."""
NAME = "{:06}.jsonl"

Number = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
"""Seconds."""
Whole = Annotated[int, msgspec.Meta(ge=-(10**11), le=10**11)]
Numbers = dict[str, Whole | Number]


class Hub(TypedDict):
    """The clock to which those of all processes are aligned."""

    host: str
    boot: str
    wall: Number


class Lease(TypedDict):
    """What a span of a lease says."""

    lease: int
    groups: list[int]


class Commit(TypedDict):
    """What a span of a commit says."""

    lease: int


Source = TypedDict(
    "Source",
    {"from": str, "host": str, "pid": int, "boot": str, "offset": Number | None, "error": Number, "dropped": int},
)
EVENTS: dict[str, Any] = {
    SPAN: tuple[str, str, Number, Number, dict[str, str | Whole | Number | list[int] | None]],
    COUNTER: tuple[str, Number, Numbers],
    TRAJECTORY: tuple[
        tuple[int, int, int], str, str, str, Number, Number, Numbers, list[tuple[str, Number, Number, Numbers]]
    ],
    TOTALS: tuple[int, int, list[tuple[str, str, int, Number, Number]]],
}
"""Kind of a line -> what follows in it."""
DETAILS: dict[str, Any] = {"leases": Lease, "commits": Commit}
"""Row of spans -> what their details have to hold."""


class TraceFiles:
    """Writes what the processes push, in the hub."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._numbers = count(1 + max((_number(file) for file in folder.glob("*.jsonl")), default=0))

    def append(self, lines: bytes) -> None:
        """Append whole lines; without room on the disk they are lost, and the log says so."""
        try:
            if self._file is None or self._file.tell() >= FILE_BYTES:
                self._file = self._next()
            self._file.write(lines)
            self._file.flush()
        except OSError as error:
            log.warning("the timeline lacks %d bytes: %s", len(lines), error)

    def close(self) -> None:
        """Close the open file; what is appended later begins a new one."""
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
        clock = {"host": socket.gethostname(), "boot": boot(), "wall": time.time() - time.monotonic()}
        file = (self._folder / NAME.format(number)).open("ab")
        file.write(msgspec.json.encode({"hub": clock}) + b"\n")
        return file


class Line(NamedTuple):
    """An event of one process."""

    source: Source
    """Whose it is."""
    shift: float
    """Seconds to add to its times for Unix time."""
    kind: str
    event: tuple[Any, ...]
    """As in `EVENTS`."""


def read_trace(folder: Path) -> Iterator[Line]:
    """The events of a run folder, oldest file first; a line that was cut off by a kill is left out.

    Raises:
        UserError: the run kept no timeline, or a line is no JSON.
        ValueError, TypeError, LookupError: a line is none of a timeline.
    """
    files = sorted((folder / TIMELINE).glob("*.jsonl"))
    if not files:
        raise UserError(f"{folder / TIMELINE}: this run has kept no timeline")
    for file in files:
        try:
            yield from _lines(file)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{file}: not JSON: {error}") from None


def _lines(file: Path) -> Iterator[Line]:
    hub: Hub | None = None
    source: Source | None = None
    shift = 0.0
    lines = list(read_lines(file))
    measured = _first_measured(lines)
    for line in lines:
        if isinstance(line, list):
            if source is None:
                raise ValueError("an event of no process")
            kind, *event = line
            found = msgspec.convert(event, EVENTS[kind])
            if kind == SPAN and found[0] in DETAILS:
                msgspec.convert(found[-1], DETAILS[found[0]])
            if any(ended < began for began, ended in _stays(kind, found)):
                raise ValueError(f"a {kind} that ends before it begins")
            yield Line(source, shift, kind, found)
        elif "hub" in line:
            hub = msgspec.convert(line["hub"], Hub)
        elif hub is None:
            raise ValueError("no clock of the hub")
        else:
            source, shift = msgspec.convert(line, Source), hub["wall"]
            if source["boot"] == hub["boot"]:
                source["error"] = 0.0
            else:
                if source["offset"] is None and (later := measured.get(_process(source))) is not None:
                    source["offset"], source["error"] = later["offset"], later["error"]
                shift += source["offset"] or 0.0


def _stays(kind: str, event: tuple[Any, ...]) -> list[tuple[float, float]]:
    """When what an event tells of began and ended."""
    if kind == SPAN:
        return [event[2:4]]
    return [(0.0, event[5]), *(call[1:3] for call in event[7])] if kind == TRAJECTORY else []


def _process(source: Source) -> tuple[str, str, int]:
    """Names a process: ids begin anew at each boot, and in each pod."""
    return source["from"], source["boot"] + source["host"], source["pid"]


def _first_measured(lines: list[Any]) -> dict[tuple[str, str, int], Source]:
    """The first measured distance to the hub's clock by process, also for what it pushed before it had measured any."""
    found: dict[tuple[str, str, int], Source] = {}
    for line in lines:
        if isinstance(line, dict) and line.get("offset") is not None:
            source = msgspec.convert(line, Source)
            found.setdefault(_process(source), source)
    return found


def _number(file: Path) -> int:
    return int(file.stem) if file.stem.isdecimal() else 0
