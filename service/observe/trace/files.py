"""The files of a run's timeline: `timeline/000001.jsonl` and so on, each of bounded size, the oldest deleted.

    {"hub": ..}                                    first line of a file: the clock to which all are aligned
    {"from": "generator/generator-0", "offset": ..} whose the next lines are, and how far that clock is from the hub's
    ["span", "engine", "generating", 812.1, 812.5, {}]

All processes of a host have one monotonic clock. A process on another host measures the distance of its clock to the
hub's with the round trip of its pushes, and half of the shortest round trip bounds the error.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from service.errors import UserError
from service.observe.trace.recorder import boot
from service.run.folder import TIMELINE, read_lines

log = logging.getLogger(__name__)

FILE_BYTES = 4 << 20
FILES = 8
"""Files that are kept."""
NAME = "{:06}.jsonl"


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

    source: dict[str, Any]
    """Whose it is: `from`, `host`, `pid`, ..."""
    shift: float
    """Seconds to add to its times for Unix time."""
    event: list[Any]


def read_trace(folder: Path) -> Iterator[Line]:
    """The events of a run folder, oldest file first; a line that was cut off by a kill is left out.

    Raises:
        UserError: the run kept no timeline, or a line is none of one.
    """
    files = sorted((folder / TIMELINE).glob("*.jsonl"))
    if not files:
        raise UserError(f"{folder / TIMELINE}: this run has kept no timeline")
    for file in files:
        try:
            yield from _lines(file)
        except ValueError as error:
            raise UserError(f"{file}: not JSON: {error}") from None


def _lines(file: Path) -> Iterator[Line]:
    hub, source, shift = dict[str, Any](), dict[str, Any](), 0.0
    for line in read_lines(file):
        if isinstance(line, list):
            yield Line(source, shift, line)
        elif "hub" in line:
            hub = line["hub"]
        else:
            source, shift = line, hub["wall"]
            if source["boot"] == hub["boot"]:
                source["error"] = 0.0
            else:
                shift += source["offset"] or 0.0


def _number(file: Path) -> int:
    return int(file.stem) if file.stem.isdecimal() else 0
