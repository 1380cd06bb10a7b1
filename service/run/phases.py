"""Prints progress lines about the phases of a command, because imports and the start of Ray take many seconds."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from service.backoff import Backoff
from service.errors import printable

log = logging.getLogger("baton")
log.setLevel(logging.INFO)

SECONDS = 5.0
"""Seconds between the first and the second line about a phase. Each later pause is twice as long."""

MAX_SECONDS = 20.0
"""Maximum seconds between two lines about a phase."""


def say(line: str) -> None:
    """Print a line without buffering, and log it; a closed output pipe causes no error."""
    line = printable(line)
    log.info(line)
    try:
        # A single write, because the thread of a phase prints too.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends


@contextmanager
def phase(
    what: str,
    say: Callable[[str], None] = say,
    left: Callable[[], str] = str,
    after: float = 0.0,
    seconds: float = SECONDS,
) -> Iterator[None]:
    """Within the block, print that the phase `what` has begun, and at growing intervals that it continues. Print
    nothing if the phase ends within `after` seconds. `left`: returns what it waits for. A thread prints, because the
    slowest phases block the event loop."""
    over = threading.Event()
    began = time.monotonic()
    if not after:
        say(f"{what} ...")

    def repeat() -> None:
        backoff = Backoff(seconds, MAX_SECONDS)
        for number in count(0 if after else 1):
            if over.wait(backoff.pause(number) if number else after):
                return
            waits = left()
            say(f"{what} ... {time.monotonic() - began:.0f} s" + (f", waiting for {waits}" if waits else ""))

    thread = threading.Thread(target=repeat, name="phase", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
