"""Stop signals while the main thread is inside Ray, where Python's handlers cannot run."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Ways to ask a run to stop; the last one comes when its terminal is closed, unless nohup has it ignored."""

GRACE_SECONDS = 1.0
"""Within which the main thread ends by itself, as it does unless it waits inside Ray."""


def heard_signals() -> list[signal.Signals]:
    """The stop signals that nobody had ignored, such as nohup."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def heard_at_once(numbers: Collection[int], give_up: Callable[[int], None]) -> Iterator[None]:
    """Call `give_up` in a thread for a signal that the main thread has not ended of within `GRACE_SECONDS`.

    A handler in Python runs once the main thread is back in Python. While it connects to a Ray whose store the same
    signal has just ended, as one for a whole process group does, that takes Ray's timeout of a minute.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    over = threading.Event()

    def watch() -> None:
        while told := reading.recv(1):
            if told[0] in numbers and not over.wait(GRACE_SECONDS):
                give_up(told[0])

    thread = threading.Thread(target=watch, name="signals", daemon=True)
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        writing.close()
        thread.join()
        reading.close()
