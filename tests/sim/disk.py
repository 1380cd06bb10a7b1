"""A disk in memory, for a journal that lives only as long as its process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from service.handoff.journal.disk import Buffer, Disk, File


class MemoryFile(File):
    """One file. Space that is allocated but not written takes no memory, because thousands of simulated generators
    reserve gigabytes of disk space."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._size = 0

    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        there = max(min(length, self._size - offset), 0)
        return bytes(self.data[offset : offset + there]).ljust(there, b"\0")

    def extents(self, offset: int) -> list[tuple[int, int]]:
        return [(offset, self.size())] if offset < self.size() else []

    def write(self, offset: int, buffers: Sequence[Buffer]) -> int:
        data = b"".join(buffers)
        self.data.extend(bytes(max(offset - len(self.data), 0)))
        self.data[offset : offset + len(data)] = data
        self._size = max(self._size, offset + len(data))
        return len(data)

    def allocate(self, size: int) -> None:
        self._size = max(self._size, size)

    def truncate(self, size: int) -> None:
        del self.data[size:]
        self._size = min(self._size, size)

    def sync(self) -> None:
        """Do nothing: the file exists only as long as its process."""

    def close(self) -> None:
        """Do nothing: the file holds nothing that must be closed."""


class MemoryDisk(Disk):
    """A disk whose files are in memory."""

    def __init__(self) -> None:
        self.files: dict[Path, MemoryFile] = {}

    def names(self, folder: Path) -> list[str]:
        return sorted(path.name for path in self.files if path.parent == folder)

    def open(self, path: Path) -> File:
        return self.files.setdefault(path, self.new_file())

    def new_file(self) -> MemoryFile:
        return MemoryFile()

    def remove(self, path: Path) -> None:
        del self.files[path]
