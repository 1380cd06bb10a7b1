"""A disk in memory that can be full, slow to remember, and cut off."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from service.handoff.journal.disk import Buffer, File


@dataclass(slots=True)
class Stored:
    """A file's bytes, and how far they were written and synced."""

    data: bytearray = field(default_factory=bytearray)
    written: int = 0
    synced: int = 0


class MemoryDisk:
    """Files in memory; `room` bytes in all."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.files: dict[Path, Stored] = {}

    def names(self, folder: Path) -> list[str]:
        """Names of the folder's files, sorted."""
        return sorted(path.name for path in self.files if path.parent == folder)

    def open(self, path: Path) -> File:
        """Open the file, made when it is missing."""
        return MemoryFile(self, self.files.setdefault(path, Stored()))

    def remove(self, path: Path) -> None:
        """Remove the file for good."""
        del self.files[path]

    def move(self, path: Path, target: Path) -> None:
        """Move the file to another folder."""
        self.files[target] = self.files.pop(path)

    def used(self) -> int:
        """Bytes taken by all files."""
        return sum(len(stored.data) for stored in self.files.values())

    def lose_power(self, rng: np.random.Generator) -> None:
        """Forget what was not synced, save for a torn beginning of it."""
        for stored in self.files.values():
            kept = int(rng.integers(stored.synced, stored.written + 1))
            stored.data[kept : stored.written] = bytes(stored.written - kept)
            stored.written = kept


class MemoryFile:
    """One file of a `MemoryDisk`."""

    def __init__(self, disk: MemoryDisk, stored: Stored) -> None:
        self._disk = disk
        self._stored = stored

    def size(self) -> int:
        """Bytes that the file has, allocated ones included."""
        return len(self._stored.data)

    def read(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`."""
        return bytes(self._stored.data[offset : offset + length])

    def extents(self, offset: int) -> list[tuple[int, int]]:
        """All of it."""
        return [(offset, self.size())] if offset < self.size() else []

    def write(self, offset: int, buffers: Sequence[Buffer]) -> int:
        """Write the buffers, as far as there is room."""
        data = b"".join(bytes(buffer) for buffer in buffers)
        grows = max(offset + len(data) - self.size(), 0)
        free = max(self._disk.room - self._disk.used(), 0)
        if grows > free:
            data = data[: len(data) - (grows - free)]
            if not data:
                raise OSError(errno.ENOSPC, "No space left on device")
        self._stored.data[offset : offset + len(data)] = data
        self._stored.written = max(self._stored.written, offset + len(data))
        return len(data)

    def allocate(self, size: int) -> None:
        """Make the file at least so long."""
        grows = max(size - self.size(), 0)
        if grows > self._disk.room - self._disk.used():
            raise OSError(errno.ENOSPC, "No space left on device")
        self._stored.data.extend(bytes(grows))

    def truncate(self, size: int) -> None:
        """Cut the file."""
        del self._stored.data[size:]
        self._stored.written = min(self._stored.written, size)
        self._stored.synced = min(self._stored.synced, size)

    def sync(self) -> None:
        """Let everything written survive."""
        self._stored.synced = self._stored.written

    def close(self) -> None:
        """Nothing to close."""
