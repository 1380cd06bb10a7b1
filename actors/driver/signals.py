"""Handles stop signals (Ctrl-C, SIGTERM, a closed terminal), which end a run or an evaluation cleanly or by force.

Outside an event loop a stop signal raises `SystemExit` (`exit_on_stop_signals`). Inside an event loop, the first signal
calls a function, and the third signal ends the process by force (`on_stop_signal`, `run_beside`). If the main thread
cannot react, another thread ends the process (`when_stuck`, `force_after`).
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any

from service.run.phases import say

_Handler = Callable[[int, FrameType | None], Any] | int | None
"""A signal handler, as `signal.signal` accepts and `signal.getsignal` returns it."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that stop a run. SIGHUP comes when the terminal is closed; nohup makes a process ignore it."""

STUCK_SECONDS = 1.0
"""Seconds within which the main thread ends after a stop signal, unless it waits inside Ray."""

FORCING = 3
"""The stop signal with this number, counted from 1, ends a stopping process by force."""
ALREADY = f"already stopping; stop signal number {FORCING} ends it at once, and unwritten results are lost"
"""The line that is printed on each stop signal between the first signal and signal number `FORCING`."""

LOOK_SECONDS = 0.005
"""While Ray ends, the handlers are set again at this interval, in seconds: Ray restores the default action of
SIGTERM."""


class Heard:
    """The handler of stop signals while an event loop runs. The first signal stops the run, later signals print a line,
    and signal number `FORCING` ends the process."""

    def __init__(self, stop: Callable[[int], None], force: Callable[[int], None]) -> None:
        self._stop, self._force = stop, force
        self._loop = asyncio.get_running_loop()
        self.came = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came += 1
        if self.came >= FORCING:
            self._force(number)
        elif self.came > 1:
            # In a thread, because this thread may be in the middle of a line.
            threading.Thread(target=say, args=(ALREADY,), name="signals", daemon=True).start()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop, number)


def heeded_signals() -> list[signal.Signals]:
    """Return the stop signals that are not ignored (nohup, for example, makes a process ignore SIGHUP)."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def exit_on_stop_signals(heeded: Iterable[signal.Signals] | None = None) -> Iterator[None]:
    """Turn the first stop signal into `SystemExit(128 + number)`, so that the `with` block cleans up. Ignore later
    signals, even after the block, because the process is about to exit.

    `heeded`: the signals to handle, even if they are ignored now; None: the stop signals that are not ignored now."""
    before = {number: signal.getsignal(number) for number in (heeded_signals() if heeded is None else heeded)}
    stopped = False

    def end(number: int, frame: FrameType | None) -> None:
        _set(dict.fromkeys(before, signal.SIG_IGN))
        raise SystemExit(128 + number)

    _set(dict.fromkeys(before, end))
    try:
        yield
    except KeyboardInterrupt:
        stopped = True
        raise SystemExit(128 + signal.SIGINT) from None
    except SystemExit as code:
        stopped = True
        # When Ray starts, it installs its own handler, which exits with the signal's number alone.
        raise SystemExit(128 | int(code.code or 0)) from None
    finally:
        heard = [now for now in map(signal.getsignal, before) if isinstance(now, Heard)]
        stopped |= any(now.came for now in heard)
        _set(dict.fromkeys(before, signal.SIG_IGN) if stopped else before)


@contextmanager
def on_stop_signal(stop: Callable[[int], None], force: Callable[[int], None]) -> Iterator[None]:
    """On the first stop signal, call `stop` with its number, in the running event loop. On the third, call `force`,
    which must not return, at any point of the main thread (`Heard`). The handlers stay after the `with` block."""
    reading, writing = socket.socketpair()
    for end in (reading, writing):
        end.setblocking(False)
    loop = asyncio.get_running_loop()
    loop.add_reader(reading, reading.recv, 64)
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)  # also of an idle loop
    _set(dict.fromkeys(heeded_signals(), Heard(stop, force)))
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        loop.remove_reader(reading)
        reading.close()
        writing.close()


def run_beside(work: Callable[[], object]) -> None:
    """Do `work`, which ends Ray, in a thread. Meanwhile keep the earlier handlers of stop signals; without earlier
    handlers, ignore the signals. (Ray restores the default action of SIGTERM outside of Python, so that a signal would
    end this process.)"""
    before = {number: signal.getsignal(number) for number in heeded_signals()}
    during = {number: handler if isinstance(handler, Heard) else signal.SIG_IGN for number, handler in before.items()}
    try:
        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work)
            while not wait([working], LOOK_SECONDS).done:
                _set(during)
            working.result()
    finally:
        _set(before)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Set the handlers of stop signals again after the `with` block, in which Ray starts. Ray replaces the handler of
    SIGTERM: in Python its handler exits with another code, in C++ it aborts the process."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    _set(before)


def _set(handlers: Mapping[signal.Signals, _Handler]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextmanager
def when_stuck(give_up: Callable[[int], None]) -> Iterator[None]:
    """If a stop signal has not ended the `with` block within `STUCK_SECONDS`, call `give_up` from another thread.
    Python's handlers run in the main thread, and Ray blocks this for a minute if a signal to the process group ended
    Ray's store."""
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
    """Yield a function that takes the number of a signal. If the `with` block has not ended `seconds` after the first
    call of that function, `end` is called with the number, from another thread."""
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
