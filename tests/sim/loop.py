"""Worlds in virtual time: their loop, clocks that follow the loop, and processes that run coroutines."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from tests.sim.virtual_asyncio import Hung, SimProcess, VirtualLoop

EPOCH = 1_700_000_000.0
"""Unix time at the beginning of a simulation."""

Resume = Callable[[Any], None]
"""A function that takes an answer."""


class Loop(VirtualLoop):
    """Runs callbacks in the order of their times; callbacks with equal times run in the order of scheduling."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.events = 0
        """Number of rounds of callbacks so far."""
        self._errors: list[BaseException] = []
        self.set_exception_handler(lambda _, told: self._errors.append(told["exception"]))

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Run `callback`, which belongs to no process, after `seconds` simulated seconds."""
        self.call_later(seconds, callback, context=Context())

    def run(self, until: Callable[[], bool]) -> bool:
        """Run callbacks until the condition `until` holds. Returns False if no callback is left and the condition still
        does not hold."""
        asyncio._set_running_loop(self)
        try:
            while not until():
                self._run_once()
                self.events += 1
                if self._errors:
                    raise self._errors.pop(0)
        except Hung:
            return False
        finally:
            asyncio._set_running_loop(None)
        return True

    def end(self) -> None:
        """Cancel all that is left, whatever it raises, and close."""
        self.set_exception_handler(lambda *told: None)
        self._errors.clear()
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.run(lambda: not asyncio.all_tasks(self))
        self.close()


class VirtualClock:
    """The clock of one operating-system process; its wall time may be wrong and jump."""

    def __init__(self, loop: Loop, start: float) -> None:
        self._loop = loop
        self._start = start
        self.wall_error = 0.0

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment."""
        return self._loop.now + self._start

    def wall(self) -> float:
        """Unix time, plus the clock's error."""
        return EPOCH + self._loop.now + self.wall_error


class Process:
    """A simulated process: its coroutines end when it dies, and stand still while it is frozen."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._process = SimProcess("")

    def die(self) -> None:
        """End every coroutine, as kill -9 would."""
        self._process.kill()
        self._process = SimProcess("")

    def freeze(self, seconds: float) -> None:
        """Stop all coroutines for some time, as SIGSTOP and SIGCONT would."""
        self._process.stop()
        self.loop.after(seconds, self._process.goes_on)

    def run(self, coroutine: Coroutine[Any, Any, None], ended: Callable[[], None] = lambda: None) -> None:
        """Begin a coroutine; calls `ended` when it has ended."""
        task = self._process.context().run(self.loop.create_task, coroutine)
        task.add_done_callback(lambda task: task.cancelled() or task.result() or ended())
