"""Memory that holds weights for other processes: shared memory of a host, opened by a path.

    | version of buffer 0, version of buffer 1, ... | buffer 0 | buffer 1 |
      a page                                          whole pages each

A writer removes the version of a buffer before it writes, and sets the new version afterwards. A reader compares the
version before and after reading, and so detects that the buffer was replaced meanwhile.
"""

from __future__ import annotations

import os
from weakref import finalize

import torch
from torch import Tensor

from service.errors import WeightsGone

PAGE = 4096
"""Alignment of the start of each buffer, in bytes."""
NO_VERSION = -1
"""The version of a buffer that is empty, or about to be filled."""


class WeightMemory:
    """Buffers in shared memory that other processes read. The memory has no name; it is freed when the last process
    that has it open closes it or ends."""

    def __init__(self, n_bytes: int, buffers: int = 1) -> None:
        """Create the memory, with `n_bytes` in each buffer."""
        self.n_bytes = n_bytes
        """Number of bytes of each buffer."""
        self._fd = os.memfd_create("baton-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, PAGE + buffers * self._stride)
        self.whole = _map(self._fd)
        """All bytes, versions included, [n] uint8."""
        self._versions = _versions(self.whole)
        self._versions.fill_(NO_VERSION)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}#{os.fstat(self._fd).st_ino}"
        """The path by which processes of the same host open the memory. It includes the file's inode number, because
        descriptors are reused."""
        self._end = finalize(self, os.close, self._fd)

    @property
    def _stride(self) -> int:
        return -(-self.n_bytes // PAGE) * PAGE

    def start(self, buffer: int) -> int:
        """Return the position of a buffer's first byte in the memory."""
        return PAGE + buffer * self._stride

    def octets(self, buffer: int = 0) -> Tensor:
        """Return the bytes of a buffer, [n] uint8."""
        start = self.start(buffer)
        return self.whole[start : start + self.n_bytes]

    def mark(self, version: int, buffer: int = 0) -> None:
        """Set the version of a buffer; `NO_VERSION` removes the version."""
        self._versions[buffer] = version

    def close(self) -> None:
        """Close the memory, so that no other process can open it; it is freed when no process has it open."""
        self._end()


class OpenMemory:
    """The shared memory of another process, open for reading as long as this object lives; tensors of it remain valid
    afterwards."""

    def __init__(self, path: str) -> None:
        """Open the memory by its path; it remains valid when its owner ends.

        Raises:
            WeightsGone: the owner has ended or is about to end, or the path leads to another memory.
        """
        at, _, number = path.partition("#")
        try:
            self._fd = os.open(at, os.O_RDWR)
        except OSError as error:  # which error is raised depends on how far the owner has ended
            raise WeightsGone(f"the weights at {path} are gone ({error.strerror})") from error
        if str(os.fstat(self._fd).st_ino) != number:
            os.close(self._fd)
            raise WeightsGone(f"the weights at {path} are gone (others are there)")
        self.octets = _map(self._fd)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}#{number}"
        """The path by which another process opens the memory while this process has it open."""
        finalize(self, os.close, self._fd)

    def version(self, buffer: int) -> int:
        """Return the version of a buffer."""
        return int(_versions(self.octets)[buffer])


def _map(fd: int) -> Tensor:
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=os.fstat(fd).st_size, dtype=torch.uint8)


def _versions(octets: Tensor) -> Tensor:
    return octets[:PAGE].view(torch.int64)
