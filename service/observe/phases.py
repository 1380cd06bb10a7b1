"""What a command is doing, said when it begins and again while it lasts: imports and Ray's start alone take long."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 5.0
"""Seconds between two lines about a phase that goes on."""


def say(line: str) -> None:
    """Print a line of progress at once; where nobody can read it any more, the work goes on without."""
    try:
        # In one piece, for a phase says its lines from a thread of its own.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it stays open as long as the process lives


@contextmanager
def phase(
    what: str,
    say: Callable[[str], None] = say,
    left: Callable[[], str] = str,
    after: float = 0.0,
    seconds: float = SECONDS,
) -> Iterator[None]:
    """Say what begins, and every so many seconds that it still goes on; `left` says what it waits for.

    What is over within `after` seconds is not spoken of. A thread speaks, for what lasts longest leaves nothing to an
    event loop.
    """
    over = threading.Event()
    began = time.monotonic()
    if not after:
        say(f"{what} ...")

    def again() -> None:
        pause = after or seconds
        while not over.wait(pause):
            waits = left()
            say(f"{what} ... {time.monotonic() - began:.0f} s" + (f", waiting for {waits}" if waits else ""))
            pause = seconds

    thread = threading.Thread(target=again, name="phase", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
