"""Measures the threads and the memory of all kinds that the processes of a command use, from /proc.

private pages            of each process; pages that forks share count once per fork, or once if the limit is near
file systems in memory   that only the command's processes see, such as its /dev/shm
memfds                   or mapped shared memory, whichever is larger, because both are mostly the same pages
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

THREADS = re.compile(r"^(Threads):\s+(\d+)", re.MULTILINE)
RESIDENT = re.compile(r"^(RssAnon|RssShmem|VmSwap):\s+(\d+)", re.MULTILINE)
SHARED_ONCE = re.compile(r"^(Pss_Anon|Pss_Shmem|SwapPss):\s+(\d+)", re.MULTILINE)
KB = 1 << 10
ESCAPED = re.compile(rb"\\([0-7]{3})")
"""An escaped character in a path, such as a space, as /proc writes it: a backslash and three octal digits."""
BLOCK = 512
"""Bytes of a block in `stat`."""
INIT = "1"
"""The id of process 1 of a PID namespace, which belongs to Baton and not to the command."""


class Processes:
    """Measures the threads and the memory of a command's processes; each method measures when it is called."""

    def __init__(self, proc: int | None) -> None:
        """`proc`: descriptor of the open folder /proc of the command's PID namespace; None: all descendants of this
        process count as the command's."""
        self._proc = proc
        self._our_mounts = dict(_memory_mounts("/proc/self"))
        nameless = os.memfd_create("probe")
        self._memfds = os.fstat(nameless).st_dev
        os.close(nameless)

    def folders(self) -> list[str]:
        """The folder in /proc of each process of the command."""
        if self._proc is None:
            return [f"/proc/{process.pid}" for process in psutil.Process().children(recursive=True)]
        here = f"/proc/self/fd/{self._proc}"
        return [f"{here}/{name}" for name in os.listdir(here) if name.isdigit() and name != INIT]

    def threads(self, folders: Sequence[str], most: int) -> int:
        """Number of threads of the processes with these folders. If there are more than `most` processes, their number
        is returned instead, and no threads are counted."""
        if len(folders) > most:
            return len(folders)
        return sum(_numbers(folder, "status", THREADS).get("Threads", 1) for folder in folders)

    def memory(self, folders: Sequence[str], most: int) -> int:
        """Bytes of memory of the processes with these folders. First an upper bound is computed, which is faster; if it
        is at most `most`, it is returned instead."""
        shared = self.nameless(folders)[self._memfds] + self._in_memory_mounts(folders)
        bound = KB * sum(sum(_numbers(folder, "status", RESIDENT).values()) for folder in folders) + shared
        if bound <= most:
            return bound
        exact = [_numbers(folder, "smaps_rollup", SHARED_ONCE) for folder in folders]
        private = sum(each.get("Pss_Anon", 0) + each.get("SwapPss", 0) for each in exact)
        return KB * private + max(KB * sum(each.get("Pss_Shmem", 0) for each in exact), shared)

    def nameless(self, folders: Sequence[str]) -> Counter[int]:
        """Bytes of the files without a name (deleted, or never named) that the processes with these folders have open,
        by device number."""
        sizes: dict[tuple[int, int], int] = {}
        for folder in folders:
            with suppress(OSError):  # the process has ended, or hides its files
                for entry in os.scandir(f"{folder}/fd"):
                    with suppress(OSError):
                        found = os.stat(entry.path)
                        if stat.S_ISREG(found.st_mode) and not found.st_nlink:
                            sizes[found.st_dev, found.st_ino] = found.st_blocks * BLOCK
        by_device = Counter[int]()
        for (device, _), size in sizes.items():
            by_device[device] += size
        return by_device

    def _in_memory_mounts(self, folders: Sequence[str]) -> int:
        """Bytes in file systems in memory that these processes see and this process does not see."""
        used: dict[bytes, int] = {}
        looked_at = set[str]()
        for folder in folders:
            with suppress(OSError):  # the process has ended, or hides its files
                if (namespace := os.readlink(f"{folder}/ns/mnt")) not in looked_at:
                    looked_at.add(namespace)
                    for device, place in _memory_mounts(folder):
                        if device not in self._our_mounts:
                            with suppress(OSError):  # this process cannot reach the file system
                                found = os.statvfs(os.fsencode(f"{folder}/root") + place)
                                used[device] = (found.f_blocks - found.f_bfree) * found.f_frsize
        return sum(used.values())


def _memory_mounts(folder: str) -> Iterator[tuple[bytes, bytes]]:
    """(device, path) of the file systems in memory that a process sees; the command chooses the paths."""
    for line in Path(folder, "mountinfo").read_bytes().split(b"\n"):
        fields, _, kind = line.partition(b" - ")
        if kind.startswith(b"tmpfs "):
            _, _, device, _, place, *_ = fields.split(b" ")
            yield device, ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), place)


def _numbers(folder: str, file: str, pattern: re.Pattern[str]) -> Mapping[str, int]:
    """The numbers of a file in /proc by name; empty if the process has ended, or hides them."""
    with suppress(OSError):  # the command chooses the names of its processes
        text = Path(folder, file).read_text("utf-8", "replace")
        return {name: int(number) for name, number in pattern.findall(text)}
    return {}
