"""Waiting for what another process or thread does: by looking until it is there, never by sleeping for a while."""

import os
import random
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")

PAUSE = 0.05
"""Seconds between two looks."""


def until(
    look: Callable[[], Found], seconds: float = 120.0, said: Callable[[], object] = str, pause: float = PAUSE
) -> Found:
    """What `look` returns as soon as that is true; the deadline is for a machine that is slow, loaded, or stuck.

    Raises:
        AssertionError: it did not come true within so many seconds; with what `said` returns then.
    """
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s: {said()}"
        time.sleep(pause)
    return found


def ran(
    *words: str | Path, folder: Path | None = None, seconds: float = 400, **variables: str
) -> subprocess.CompletedProcess[str]:
    """How a command ended, in a folder and with more environment variables."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to outgoing connections meanwhile."""
    while True:
        port = random.SystemRandom().randrange(21_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
