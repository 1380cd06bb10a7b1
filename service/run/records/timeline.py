"""Writes and joins the files of a run's timeline, `timeline/000001.jsonl` and so on, each of bounded size.

Each line is an event of Chrome's Trace Event Format (`service.observe.recorder`). Times of different hosts are
comparable only as far as the wall clocks of the hosts agree.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
from msgspec import Struct

from service.errors import UserError
from service.run.folder import TIMELINE, refuse_larger

log = logging.getLogger(__name__)

FILE_BYTES = 4 << 20
FILES = 8
"""Maximum number of timeline files; older files are deleted."""


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


class _Event(Struct):
    """The fields that an event must have; others are not read."""

    ph: Literal["X", "C", "M"]
    name: str
    pid: int


_DECODER = msgspec.json.Decoder(_Event)


def timeline_events(folder: Path) -> Iterator[bytes]:
    """The events of a run's timeline as JSON. Repeated names of processes and rows are left out, and so is a line that
    a killed writer left incomplete. `UserError` if there is no timeline, or a line is no event."""
    files = sorted(file for file in (folder / TIMELINE).glob("*.jsonl") if file.is_file())
    if not files:
        raise UserError(f"{folder / TIMELINE}: this run has kept no timeline")
    refuse_larger(files, 2 * FILES * FILE_BYTES)
    names = set[bytes]()
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                continue
            try:
                event = _DECODER.decode(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file}, line {number}: no event of a timeline ({error!r:.200})") from None
            if event.ph == "M":
                if line in names:
                    continue
                names.add(line)
            yield line.removesuffix(b"\n")
