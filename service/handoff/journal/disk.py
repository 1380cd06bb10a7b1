"""The disk operations of the journal; a simulation substitutes disks in memory, which fail or lose data."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from service.files import sync

Buffer = bytes | bytearray | memoryview

MAX_BUFFERS_PER_WRITE = 512
"""Buffers of one `writev` call; the kernel's IOV_MAX is 1024."""


class File:
    """The open file of a segment; a missing file is created."""

    def __init__(self, path: Path) -> None:
        # A link with a missing target is refused: a new file at the target would hide the missing frames.
        create = 0 if path.is_symlink() else os.O_CREAT
        self._fd = os.open(path, os.O_RDWR | create | os.O_CLOEXEC, 0o600)
        # This closes the files of a journal that refused to start and is then garbage-collected.
        self._close = weakref.finalize(self, os.close, self._fd)

    def size(self) -> int:
        """The size of the file in bytes, reserved space included."""
        return os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`; fewer at the end of the file."""
        parts = []
        while length > 0 and (part := os.pread(self._fd, length, offset)):
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def extents(self, offset: int) -> list[tuple[int, int]]:
        """The written ranges (start, stop) from `offset` on; all listed before any read: read-ahead fills holes."""
        found: list[tuple[int, int]] = []
        stop = offset
        while (start := self._seek(stop, os.SEEK_DATA)) is not None:
            stop = self._seek(start, os.SEEK_HOLE) or self.size()
            found.append((start, stop))
        return found

    def _seek(self, offset: int, what: int) -> int | None:
        try:
            return os.lseek(self._fd, offset, what)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return None

    def write(self, offset: int, buffers: Sequence[Buffer]) -> int:
        """Write the buffers; returns the number of bytes written; some are missing if the disk is full."""
        total = 0
        for first in range(0, len(buffers), MAX_BUFFERS_PER_WRITE):
            some = buffers[first : first + MAX_BUFFERS_PER_WRITE]
            written = os.pwritev(self._fd, some, offset + total)
            total += written
            if written < sum(len(buffer) for buffer in some):
                break
        return total

    def allocate(self, size: int) -> None:
        """Reserve the file's first `size` bytes on the disk; raises an OSError if the disk is full."""
        os.posix_fallocate(self._fd, 0, size)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """Return once everything that was written is on the disk."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        self._close()


class Disk:
    """The machine's file system."""

    def names(self, folder: Path) -> list[str]:
        """Names of the folder's files, sorted; a missing folder is created."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return sorted(os.listdir(folder))

    def open(self, path: Path) -> File:
        """Open the file. A missing file is created, and its name is on the disk before this function returns."""
        new = not path.exists()
        file = File(path)
        if new:
            sync(path.parent)
        return file

    def remove(self, path: Path) -> None:
        path.unlink()
        sync(path.parent)
