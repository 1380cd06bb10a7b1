"""The watchdog: a process that waits for the driver's death and then ends every process of the run.

Ray ends actors and workers when their driver dies, but Ray's agents can remain for over a minute, and an engine can
outlive its killed actor. Every process of a run inherits the run's mark in its environment; the watchdog kills the
processes with the mark. It is a script that needs only the standard library, in a process session of its own, so that
a signal to the driver's process group does not end the watchdog.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Set
from pathlib import Path

MARK = "BATON_RUN_MARK"
"""Environment variable with the mark of the run to which a process belongs; empty in a process that outlives the run,
whoever its parents are."""

GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL."""
SCAN_SECONDS = 1.0
"""Seconds between two scans of the processes while the driver lives."""
QUIET = 0.5
"""If no marked process was found for this many seconds, all processes of the run have ended."""
DEADLINE = 15.0
"""Seconds after which the watchdog stops its attempts on a process that cannot be killed."""
NEEDED = ", and without it no part of the run can go on"
NO_RAYLET = f"Ray's raylet has ended{NEEDED}"
IN_ORDER = "in-order"
"""In the folder of a local Ray: this file says that its driver ends Ray itself."""


def start_watchdog(mark: str, ray_folder: Path | None = None, summary: Path | None = None) -> None:
    """Start the watchdog of this process.

    When this process has died, the watchdog ends the processes that have `mark` in their environment, and deletes the
    folder of the local Ray, if there is one. If Ray's raylet died first, Ray may have ended this process before it
    could say why: then the watchdog says this, and writes the run's summary.
    """
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark, str(ray_folder or ""), str(summary or "")]
    environment = {key: value for key, value in os.environ.items() if key != MARK}
    # The first child exits at once. So the watchdog is not ended together with the driver's descendants.
    subprocess.run(command, check=True, timeout=30, start_new_session=True, env=environment, stdin=subprocess.DEVNULL)


def marked_processes(mark: str, known: Set[tuple[int, str]] = frozenset()) -> set[tuple[int, str]]:
    """Return (process id, start time) of all living processes that have the mark or are in `known`, and of their
    descendants.

    A process that renames itself overwrites the start of its environment. Ray's agents lose their mark that way; their
    parent keeps its mark.
    """
    needle = f"{MARK}={mark}".encode()
    living: dict[int, tuple[int, str]] = {}
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The format is "id (name) state parent ..."; the start time is field 22, and distinguishes a
                # reused id from the old one.
                state, parent, *rest = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if state != b"Z":
                    living[int(entry.name)] = (int(parent), rest[17].decode())
                    variables = (entry / "environ").read_bytes().split(b"\0")
                    if needle in variables:
                        found.add(int(entry.name))
                    elif f"{MARK}=".encode() in variables:
                        del living[int(entry.name)]
    found |= {process for process, (_, start) in living.items() if (process, start) in known}
    while more := {process for process, (parent, _) in living.items() if parent in found} - found:
        found |= more
    return {(process, living[process][1]) for process in found}


def end_processes(mark: str, known: set[tuple[int, str]]) -> None:
    """End the marked and the known processes, by SIGTERM, then by SIGKILL, until none is left or `DEADLINE` has passed.

    A new process has the mark only after exec, so a scan can miss it. So all processes count as ended only after no
    process was found for `QUIET` seconds.
    """
    start = seen = now = time.monotonic()
    left = known
    while now < start + DEADLINE:
        left = marked_processes(mark, left)
        now = time.monotonic()
        if left:
            seen = now
        elif now > seen + QUIET:
            return
        for process, _ in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL if now > start + GRACE else signal.SIGTERM)
        time.sleep(0.1)


def wait_for_death(process: int, mark: str) -> tuple[set[tuple[int, str]], bool]:
    """Wait until a process has died; returns the marked processes and their descendants, as the last scan found them,
    and whether the raylet that the process had started died before.

    It scans repeatedly while it waits: a process that has lost first its mark and then its parent is found only by a
    scan that ran before.
    """
    known: set[tuple[int, str]] = set()
    raylet, is_raylet_first = -1, False
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return known, False
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    while handle not in (ended := dict(poll.poll(SCAN_SECONDS * 1000))):
        if raylet in ended:
            poll.unregister(raylet)
            raylet, is_raylet_first = -1, True
        known = marked_processes(mark, known)
        if raylet < 0 and (raylet := open_raylet(process, known)) >= 0:
            poll.register(raylet, select.POLLIN)
            is_raylet_first = False  # it is that of a later try to start Ray
    return known, is_raylet_first


def open_raylet(driver: int, known: Set[tuple[int, str]]) -> int:
    """Open the raylet that a driver has started, as a file descriptor; -1 if there is none."""
    for process, _ in known:
        with contextlib.suppress(OSError):
            name, _, rest = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")
            if name.endswith(b"(raylet") and int(rest.split()[1]) == driver:
                return os.pidfd_open(process)
    return -1


def main() -> None:
    """Wait for the death of the process named on the command line, then clean up."""
    owner, mark, ray_folder, summary = sys.argv[1:]
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    known, is_raylet_first = wait_for_death(int(owner), mark)
    if is_raylet_first and summary and not Path(ray_folder, IN_ORDER).exists() and not Path(summary).exists():
        with contextlib.suppress(OSError):  # the disk is full, or the terminal gone
            Path(summary).write_text(json.dumps({"state": "failed", "reason": NO_RAYLET, "exit_code": 1}) + "\n")
            print(NO_RAYLET, flush=True)
    end_processes(mark, known)
    if ray_folder:
        shutil.rmtree(ray_folder, ignore_errors=True)


if __name__ == "__main__":
    main()
