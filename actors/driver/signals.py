"""Stop signals (Ctrl-C, SIGTERM, a closed terminal): how they end a run or an evaluation, in order or by force.

Outside an event loop a stop signal raises `SystemExit` (`exit_on_stop_signals`); inside one it calls a function
(`on_stop_signal`). Where the main thread cannot react, a thread ends the process (`when_stuck`, `force_after`).
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP comes when the terminal is closed, unless nohup has it ignored."""

STUCK_SECONDS = 1.0
"""Seconds after a stop signal in which the main thread ends, unless it waits inside Ray."""


def heeded_signals() -> list[signal.Signals]:
    """The stop signals that were not set to be ignored, as nohup does."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def exit_on_stop_signals(heeded: Iterable[signal.Signals] | None = None) -> Iterator[None]:
    """Turn the first stop signal into `SystemExit(128 + number)`, so that the block cleans up; ignore further ones.

    `heeded`: the signals that count, also where they are ignored now; None: those that are not.
    """
    before = {number: signal.getsignal(number) for number in (heeded_signals() if heeded is None else heeded)}

    def end(number: int, frame: FrameType | None) -> None:
        _ignore(before)
        raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except SystemExit as stopped:
        # Ray replaces the handler by its own when it starts, which exits with the signal's number alone.
        raise SystemExit(128 | int(stopped.code or 0)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def on_stop_signal(stop: Callable[[int], None]) -> Iterator[None]:
    """Call `stop` with the number of each stop signal, from the running event loop.

    After a block that ended well, stop signals are ignored: what follows takes seconds, and a signal would cut it
    short.
    """
    loop, heeded = asyncio.get_running_loop(), heeded_signals()
    for number in heeded:
        loop.add_signal_handler(number, stop, number)
    yield
    for number in heeded:
        loop.remove_signal_handler(number)
    _ignore(heeded)


def _ignore(numbers: Iterable[signal.Signals]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def when_stuck(give_up: Callable[[int], None]) -> Iterator[None]:
    """If a stop signal has not ended the block within `STUCK_SECONDS`, call `give_up` from another thread.

    A Python handler runs only when the main thread is back in Python. When a signal to the process group has ended
    Ray's store, connecting to Ray blocks the main thread for Ray's timeout of a minute.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    over = threading.Event()

    def watch() -> None:
        while received := reading.recv(1):
            if received[0] in STOP_SIGNALS and not over.wait(STUCK_SECONDS):
                give_up(received[0])

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


@contextmanager
def force_after(seconds: float, end: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
    """Yields a function that starts a countdown when it is first called with a signal's number.

    If the block has not ended when the countdown has, `end` is called with that number, from another thread.
    """
    started: list[threading.Timer] = []

    def start(number: int) -> None:
        if not started:
            timer = threading.Timer(seconds, end, (number,))
            timer.daemon = True
            started.append(timer)
            timer.start()

    try:
        yield start
    finally:
        for timer in started:
            timer.cancel()
