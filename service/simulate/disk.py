"""A disk in memory that can be full and can lose power."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from service.handoff.journal.disk import Buffer, File

AMPLE_ROOM = 1 << 40
"""Bytes that no simulation fills."""


class MemoryDisk:
    """Files in memory; `room` bytes in all."""

    def __init__(self, room: int = AMPLE_ROOM) -> None:
        self.room = room
        self.files: dict[Path, MemoryFile] = {}

    def names(self, folder: Path) -> list[str]:
        """Names of the folder's files, sorted."""
        return sorted(path.name for path in self.files if path.parent == folder)

    def open(self, path: Path) -> File:
        """Open the file, made when it is missing."""
        return self.files.setdefault(path, MemoryFile(self))

    def remove(self, path: Path) -> None:
        """Remove the file for good."""
        del self.files[path]

    def move(self, path: Path, target: Path) -> None:
        """Move the file to another folder."""
        self.files[target] = self.files.pop(path)

    def used(self) -> int:
        """Bytes taken by all files."""
        return sum(file.size() for file in self.files.values())

    def lose_power(self, rng: np.random.Generator) -> None:
        """Lose the unsynced bytes of every file, except for a torn beginning of them."""
        for file in self.files.values():
            file.lose_power(rng)


class MemoryFile:
    """One file of a `MemoryDisk`: its bytes, and how far they were written and synced.

    What is allocated and not written takes no memory: thousands of generators reserve gigabytes.
    """

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self._data = bytearray()
        self._size = 0
        self._written = self._synced = 0

    def size(self) -> int:
        """Bytes that the file has, allocated ones included."""
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`."""
        there = max(min(length, self._size - offset), 0)
        return bytes(self._data[offset : offset + there]).ljust(there, b"\0")

    def extents(self, offset: int) -> list[tuple[int, int]]:
        """All of the file in one stretch."""
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
        self._data.extend(bytes(max(offset - len(self._data), 0)))
        self._data[offset : offset + len(data)] = data
        self._size = max(self._size, offset + len(data))
        self._written = max(self._written, offset + len(data))
        return len(data)

    def allocate(self, size: int) -> None:
        """Make the file at least so long."""
        grows = max(size - self.size(), 0)
        if grows > self._disk.room - self._disk.used():
            raise OSError(errno.ENOSPC, "No space left on device")
        self._size += grows

    def truncate(self, size: int) -> None:
        """Cut the file."""
        del self._data[size:]
        self._size = min(self._size, size)
        self._written = min(self._written, size)
        self._synced = min(self._synced, size)

    def sync(self) -> None:
        """Make everything written survive a loss of power."""
        self._synced = self._written

    def close(self) -> None:
        """Nothing to close."""

    def lose_power(self, rng: np.random.Generator) -> None:
        """Keep a random part of what was written and not synced; the rest becomes zeros."""
        kept = int(rng.integers(self._synced, self._written + 1))
        self._data[kept : self._written] = bytes(self._written - kept)
        self._written = kept
