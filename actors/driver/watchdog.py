"""The watchdog owns a run's processes: when the driver dies, however it dies, it ends all of them.

Ray ends actors and workers when their driver dies, but its own agents can linger for over a minute, and an engine whose
actor was killed can outlive it. Every process of a run inherits the run's mark in its environment; the watchdog waits
for the driver's death and then kills whatever carries the mark. It runs as a script of its own with the standard
library only, in its own process session, so that a signal to the driver's group does not take it along.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "BATON_RUN_MARK"
"""Environment variable that names the run a process belongs to."""

GRACE = 2.0
"""Seconds between asking the processes to end and ending them."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at the run's processes while it lives."""
QUIET = 0.5
"""Seconds without any marked process after which all have ended."""
DEADLINE = 15.0
"""Seconds after which the watchdog gives up on a process that cannot be killed."""


def start_watchdog(mark: str, ray_folder: Path | None = None, logs: Path | None = None) -> None:
    """Start the watchdog of this process.

    After its death, what carries `mark` is ended, the workers' logs of the Ray that lived in `ray_folder` are kept in
    `logs`, and `ray_folder` is deleted.
    """
    folders = [str(folder) for folder in (ray_folder, logs) if folder is not None]
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark, *folders]
    environment = {key: value for key, value in os.environ.items() if key != MARK}
    # The first child exits at once, so that the watchdog is nobody's child and a stop of the driver's tree misses it.
    subprocess.run(command, check=True, timeout=30, start_new_session=True, env=environment, stdin=subprocess.DEVNULL)


def marked_processes(mark: str) -> list[int]:
    """Ids of the living processes whose environment carries the mark, and of all that descend from one."""
    return [process for process, _ in _marked(mark, set())]


def _marked(mark: str, known: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """(id, start time) of what carries the mark, of the known ones that still live, and of all their descendants.

    A process that renames itself overwrites the start of its environment: Ray's agents lose their mark that way, but
    the process that started them keeps its own.
    """
    needle = f"{MARK}={mark}".encode()
    living: dict[int, tuple[int, str]] = {}
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # "id (name) state parent ..."; the start time is field 22, and tells a reused id from the old one.
                state, parent, *rest = (entry / "stat").read_text().rpartition(")")[2].split()
                if state != "Z":
                    living[int(entry.name)] = (int(parent), rest[17])
                    if needle in (entry / "environ").read_bytes().split(b"\0"):
                        found.add(int(entry.name))
    found |= {process for process, (_, start) in living.items() if (process, start) in known}
    while more := {process for process, (parent, _) in living.items() if parent in found} - found:
        found |= more
    return {(process, living[process][1]) for process in found}


def end_processes(mark: str, known: set[tuple[int, str]]) -> None:
    """Ask the marked and the known processes to end, then kill what is left, until none remains or time is up.

    A process shows its mark only once it has replaced its parent's image, so none may be seen for a while.
    """
    start = seen = now = time.monotonic()
    left = known
    while now < start + DEADLINE:
        left = _marked(mark, left)
        now = time.monotonic()
        if left:
            seen = now
        elif now > seen + QUIET:
            return
        for process, _ in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL if now > start + GRACE else signal.SIGTERM)
        time.sleep(0.1)


def keep_logs(ray_folder: Path, logs: Path) -> None:
    """Copy what the workers of a Ray printed."""
    for source in ray_folder.glob("session_2*/logs/worker-*.*"):
        with contextlib.suppress(OSError):  # a full disk must not keep the rest from being cleaned up
            if source.stat().st_size:
                shutil.copyfile(source, logs / source.name)


def wait_for_death(process: int, mark: str) -> set[tuple[int, str]]:
    """Block until the process is gone; returns the marked processes and their descendants that were seen meanwhile.

    One that has lost its mark and then its parent can be told to belong to the run only because it was seen before.
    """
    known: set[tuple[int, str]] = set()
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return known
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    while not poll.poll(LOOK_SECONDS * 1000):
        known = _marked(mark, known)
    return known


def main() -> None:
    """Guard the process named on the command line."""
    owner, mark, folders = int(sys.argv[1]), sys.argv[2], [Path(folder) for folder in sys.argv[3:]]
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_processes(mark, wait_for_death(owner, mark))
    if len(folders) == 2:
        keep_logs(*folders)
    if folders:
        shutil.rmtree(folders[0], ignore_errors=True)


if __name__ == "__main__":
    main()
