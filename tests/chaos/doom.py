"""Where a process of a chaos run ends itself with kill -9: at the n-th pass of a named seam.

A plan is a list of [seam, n]. A process meets the entries one after the other, over all its lives: each death uses one
up, on disk, before it happens.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.files import write_atomic
from service.handoff.journal.disk import Buffer, Disk, File

BUFFER_SEAMS = (
    "append.before_write",
    "append.torn",
    "append.before_sync",
    "append.after_sync",
    "segment.before_allocate",
    "segment.before_snapshot",
    "segment.torn_snapshot",
    "segment.after_snapshot",
    "reclaim.before",
    "reclaim.after",
    "submit.before",
    "submit.after",
    "claim.after",
    "lease.after",
    "commit.before",
    "commit.after",
    "covered.before",
    "covered.after",
)
TRAINER_SEAMS = (
    "lease.after",
    "commit.before",
    "commit.after",
    "checkpoint.half_files",
    "manifest.before",
    "manifest.half",
    "manifest.after",
    "covered.after",
)
GENERATOR_SEAMS = ("claim.after", "turn.after", "submit.before", "submit.after")


class Doom:
    """The deaths that one process still has before it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._plan: list[list[Any]] = json.loads(file.read_text()) if file.exists() else []
        self._passes = 0

    def at(self, seam: str) -> None:
        """Die here if it is time."""
        if self.is_now(seam):
            self.die()

    def is_now(self, seam: str) -> bool:
        """Whether the process is to die at this pass of the seam."""
        if not self._plan or self._plan[0][0] != seam:
            return False
        self._passes += 1
        return self._passes >= int(self._plan[0][1])

    def die(self) -> None:
        """Use the entry up and end."""
        seam = self._plan.pop(0)[0]
        write_atomic(self._file, json.dumps(self._plan))
        with self._file.with_suffix(".deaths").open("a") as deaths:
            deaths.write(f"{seam}\n")
            deaths.flush()
        os.kill(os.getpid(), signal.SIGKILL)


class DoomedDisk(Disk):
    """The machine's file system, on which the process may die in the middle of anything."""

    def __init__(self, doom: Doom) -> None:
        self._doom = doom

    def open(self, path: Path) -> File:
        begins = not path.exists() and path.stem.strip("0") != ""
        super().open(path).close()
        return DoomedFile(path, self._doom, begins)

    def remove(self, path: Path) -> None:
        self._doom.at("reclaim.before")
        super().remove(path)
        self._doom.at("reclaim.after")


class DoomedFile(File):
    """A segment; `begins` while it has no snapshot yet."""

    def __init__(self, path: Path, doom: Doom, begins: bool) -> None:
        super().__init__(path)
        self._doom = doom
        self._begins = begins

    def allocate(self, size: int) -> None:
        if self._begins:
            self._doom.at("segment.before_allocate")
        super().allocate(size)

    def write(self, offset: int, buffers: Sequence[Buffer]) -> int:
        before, torn = ("segment.before_snapshot", "segment.torn_snapshot") if self._begins else ("", "append.torn")
        self._doom.at(before or "append.before_write")
        if self._doom.is_now(torn):
            joined = b"".join(bytes(buffer) for buffer in buffers)
            super().write(offset, [joined[: 2 * len(joined) // 3]])
            self._doom.die()
        written = super().write(offset, buffers)
        self._doom.at("append.before_sync")
        return written

    def sync(self) -> None:
        super().sync()
        self._doom.at("segment.after_snapshot" if self._begins else "append.after_sync")
        self._begins = False
