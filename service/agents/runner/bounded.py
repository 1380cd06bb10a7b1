"""Runs one command to its end, in the command process: collects its output and ends the command at its limits.

When `run_command` returns, every process that the command started has ended: the command process is their subreaper.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from service.agents.runner.forward import forwarded
from service.agents.runner.sandbox import Launch, Started, start
from service.agents.runner.usage import Processes
from service.rollout.child_main import end_descendants

CHUNK = 1 << 16
WATCH_SECONDS = 0.5
"""Minimum seconds between two checks of memory, processes and folder."""
WATCH_SHARE = 0.05
"""Maximum fraction of the command process's time that the checks of memory, processes and folder may take."""
ENTRIES_AT_ONCE = 1000
FILE_BYTES = 4096
"""Each file and each folder counts as at least this many bytes."""


class CommandEnd(NamedTuple):
    """How a command ended."""

    code: int | None
    """The command's exit code, or 128 + the signal that ended the command; None: the command was ended at a limit."""
    limit: str
    """Name of the limit at which the command was ended; empty if it was not ended at a limit."""
    output: bytes
    """The command's stdout and stderr, up to `limits.output_bytes`."""


async def run_command(launch: Launch, time: str, root: Path, base_url: str, namespaces: bool) -> CommandEnd:
    """Run a command in its folder below `root` until it ends or exceeds a limit; `time`: the name of its time limit.

    Raises:
        NotStarted: the command cannot be started.
    """
    started = start(launch, namespaces)
    run = _Run(started, launch.limits, root)
    try:
        async with AsyncExitStack() as scope:
            if started.listener is not None:
                await scope.enter_async_context(forwarded(started.listener, base_url))
            await run.until_stopped(time)
    finally:
        run.end()
    if not run.limit and await _is_larger(root, launch.limits["folder_bytes"]):
        run.limit = "folder_bytes"
    return CommandEnd(run.code, run.limit, bytes(run.output))


class _Run:
    def __init__(self, started: Started, limits: Mapping[str, Any], root: Path) -> None:
        self._started, self._process = started, started.process
        self._processes = Processes(started.proc)
        self._limits = limits
        self._root = root
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        if started.process.stdout is None:
            raise RuntimeError("the command was started without a pipe")
        self._stdout = started.process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._pidfd = os.pidfd_open(started.process.pid)
        self._loop.add_reader(self._stdout, self._read)
        self._loop.add_reader(self._pidfd, self._reap)
        self.output = bytearray()
        self.code: int | None = None
        self.limit = ""

    async def until_stopped(self, time: str) -> None:
        """Wait until the command ends or exceeds a limit."""
        watcher = asyncio.create_task(self._watch())
        watcher.add_done_callback(lambda _: self._stopped.set())  # if the watcher fails, the command is stopped
        try:
            async with asyncio.timeout(self._limits[time]):
                await self._stopped.wait()
        except TimeoutError:
            self._check_processes(self._processes.folders())
            self._stop(time)
        finally:
            self._loop.remove_reader(self._pidfd)
            if not watcher.cancel():
                watcher.result()

    def end(self) -> None:
        """End all processes, and read the rest of the output."""
        with suppress(ProcessLookupError):  # it has ended
            # First: with the outer process the kernel ends all processes in the namespaces, however many there are.
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        end_descendants()
        while self._read():
            pass
        self._loop.remove_reader(self._stdout)
        self._stdout.close()
        os.close(self._pidfd)
        if self._started.proc is not None:
            os.close(self._started.proc)
        self._process.returncode = self.code or 0  # another process reaped the command

    def _read(self) -> bool:
        """Read a part of the output; False if none is available at the moment."""
        if (data := self._stdout.read(CHUNK)) is None:
            return False
        if not data:
            self._loop.remove_reader(self._stdout)
        room = self._limits["output_bytes"] - len(self.output)
        self.output += data[:room]
        if len(data) > room:
            self._stop("output_bytes")
        return bool(data) and len(data) <= room

    def _reap(self) -> None:
        """Reap ended processes: the command, or processes that it orphaned."""
        with suppress(ChildProcessError):  # there are no other children
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._process.pid:
                    code = os.waitstatus_to_exitcode(ended[1])
                    self.code = code if code >= 0 else 128 - code
                    self._stop("")

    def _stop(self, limit: str) -> None:
        self.limit = self.limit or limit
        self._stopped.set()

    async def _watch(self) -> None:
        """Stop the command when it exceeds a limit that the operating system does not enforce."""
        while not self._stopped.is_set():
            began = self._loop.time()
            self._reap()
            folders = self._processes.folders()
            self._check_processes(folders)
            if self._processes.memory(folders, most := self._limits["memory_bytes"]) > most:
                self._stop("memory_bytes")
            deleted = self._processes.nameless(folders)[self._root.stat().st_dev]
            if await _is_larger(self._root, self._limits["folder_bytes"] - deleted):
                self._stop("folder_bytes")
            await asyncio.sleep(max(WATCH_SECONDS, (self._loop.time() - began) / WATCH_SHARE))

    def _check_processes(self, folders: Sequence[str]) -> None:
        if self._processes.threads(folders, most := self._limits["processes"]) > most:
            self._stop("processes")


async def _is_larger(root: Path, limit: int) -> bool:
    """Whether a folder takes more than `limit` bytes on disk; links are not followed."""
    total = 0
    for number, size in enumerate(_sizes(root), start=1):
        total += max(size, FILE_BYTES)
        if total > limit:
            return True
        if number % ENTRIES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return False


def _sizes(root: Path) -> Iterator[int]:
    """Bytes on disk of each entry below a folder; `sys.maxsize` for an entry too deep to be measured."""
    folders = [str(root)]
    while folders:
        try:
            for entry in os.scandir(folders.pop()):
                yield entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
        except OSError as error:  # the entry is gone, or not readable
            if error.errno == errno.ENAMETOOLONG:
                yield sys.maxsize
