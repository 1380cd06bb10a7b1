"""A disk in memory, which may fill up and lose power."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from service.handoff.journal.disk import Buffer, Disk, File

AMPLE_ROOM = 1 << 40
"""Bytes that no simulation fills."""


class MemoryFile(File):
    """One file, which knows how far it was written and synced. Space that is allocated but not written takes no memory,
    because thousands of simulated generators reserve gigabytes of disk space."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.data = bytearray()
        self._disk = disk
        self._size = self._written = self._synced = 0

    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        there = max(min(length, self._size - offset), 0)
        return bytes(self.data[offset : offset + there]).ljust(there, b"\0")

    def extents(self, offset: int) -> list[tuple[int, int]]:
        return [(offset, self._size)] if offset < self._size else []

    def write(self, offset: int, buffers: Sequence[Buffer]) -> int:
        self._disk.changes()
        data = b"".join(buffers)
        grows = max(offset + len(data) - self._size, 0)
        if grows > (free := self._disk.free()):
            data = data[: len(data) - (grows - free)]
            if not data:
                raise OSError(errno.ENOSPC, "No space left on device")
        self.data.extend(bytes(max(offset - len(self.data), 0)))
        self.data[offset : offset + len(data)] = data
        self._written = max(self._written, offset + len(data))
        self._size = max(self._size, self._written)
        return len(data)

    def allocate(self, size: int) -> None:
        self._disk.changes()
        if size - self._size > self._disk.free():
            raise OSError(errno.ENOSPC, "No space left on device")
        self._size = max(self._size, size)

    def truncate(self, size: int) -> None:
        del self.data[size:]
        self._size, self._written = min(self._size, size), min(self._written, size)
        self._synced = min(self._synced, size)

    def sync(self) -> None:
        self._disk.changes()
        self._synced = self._written
        self._disk.changes()

    def close(self) -> None:
        """Do nothing: the file exists only as long as its process."""

    def lose_power(self, rng: np.random.Generator) -> None:
        """Keep a random part of what was written and not synced; the rest becomes zeros."""
        kept = int(rng.integers(self._synced, self._written + 1))
        self.data[kept : self._written] = bytes(self._written - kept)
        self._written = kept


class MemoryDisk(Disk):
    """A disk whose files are in memory, and may have `room` bytes in all."""

    def __init__(self, room: int = AMPLE_ROOM) -> None:
        self.room = room
        self.files: dict[Path, MemoryFile] = {}
        self.changes: Callable[[], None] = lambda: None
        """Called before each change of a file, and after each sync; may end the process by an exception."""

    def names(self, folder: Path) -> list[str]:
        return sorted(path.name for path in self.files if path.parent == folder)

    def open(self, path: Path) -> File:
        return self.files.setdefault(path, MemoryFile(self))

    def remove(self, path: Path) -> None:
        self.changes()
        del self.files[path]

    def used(self) -> int:
        """Bytes taken by all files."""
        return sum(file.size() for file in self.files.values())

    def free(self) -> int:
        """Bytes that are left."""
        return max(self.room - self.used(), 0)

    def lose_power(self, rng: np.random.Generator) -> None:
        """Lose the unsynced bytes of every file, except for a torn beginning of them."""
        for file in self.files.values():
            file.lose_power(rng)
