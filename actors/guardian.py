"""The guardian owns a run's processes: when the driver dies, however it dies, it ends all of them.

Ray ends actors and workers when their driver dies, but its own agents can linger for over a minute, and an engine whose
actor was killed can outlive it. Every process of a run inherits the run's mark in its environment; the guardian waits
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
DEADLINE = 15.0
"""Seconds after which the guardian gives up on a process that cannot be killed."""


def start_guardian(mark: str, remove: list[Path]) -> None:
    """Start the guardian of this process: after its death, what carries `mark` is ended and `remove` is deleted."""
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark, *map(str, remove)]
    environment = {key: value for key, value in os.environ.items() if key != MARK}
    # The first child exits at once, so that the guardian is nobody's child and a stop of the driver's tree misses it.
    subprocess.run(command, check=True, timeout=30, start_new_session=True, env=environment, stdin=subprocess.DEVNULL)


def marked_processes(mark: str) -> list[int]:
    """Ids of the living processes whose environment carries the mark."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def end_processes(mark: str) -> None:
    """Ask the marked processes to end, then kill what is left, until none remains or the deadline has passed."""
    start = time.monotonic()
    number = signal.SIGTERM
    while (left := marked_processes(mark)) and time.monotonic() < start + DEADLINE:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        time.sleep(0.2)
        if time.monotonic() > start + GRACE:
            number = signal.SIGKILL


def wait_for_death(process: int) -> None:
    """Block until the process is gone."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()


def main() -> None:
    """Guard the process named on the command line."""
    owner, mark, remove = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wait_for_death(owner)
    end_processes(mark)
    for path in remove:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
