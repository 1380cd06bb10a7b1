"""Worlds in virtual time: their loop, clocks that follow the loop, and processes that wait.

A process runs activities. An activity is a generator function: it yields what it waits for, and the result comes back
as the value of the `yield`:

    def commit(self) -> Activity:
        yield self.wait(2.5)                                          # simulated seconds
        answer = yield self.ask(lambda buffer: buffer.commit(...))    # a request of the buffer, see host.py
        yield self.all_of([self.publish(), self.save()])              # until all of these activities have ended
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any

from tests.sim.virtual_asyncio import Hung, VirtualLoop

EPOCH = 1_700_000_000.0
"""Unix time at the beginning of a simulation."""

Resume = Callable[[Any], None]
"""A function that continues an activity with a result."""
Waiting = Callable[[Resume], None]
"""A function that an activity yields. It begins to wait, and later calls its argument once, with the result."""
Activity = Generator[Waiting, Any, None]


class Loop(VirtualLoop):
    """Runs callbacks in the order of their times; callbacks with equal times run in the order of scheduling."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.events = 0
        """Number of rounds of callbacks so far."""
        self._errors: list[BaseException] = []
        self.set_exception_handler(lambda _, told: self._errors.append(told["exception"]))

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Run `callback` after `seconds` simulated seconds."""
        self.call_later(seconds, callback)

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
    """A simulated process: its activities end when it dies, and pause while it is frozen."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.life = 0
        """Number of deaths so far; an activity that began before the last death never continues."""
        self._frozen_until = 0.0

    def die(self) -> None:
        """End every activity, as kill -9 would."""
        self.life += 1

    def freeze(self, seconds: float) -> None:
        """Stop all activities for some time, as SIGSTOP and SIGCONT would."""
        self._frozen_until = max(self._frozen_until, self.loop.now + seconds)

    def run(self, activity: Activity, ended: Callable[[], None] = lambda: None) -> None:
        """Begin an activity; calls `ended` when the activity has ended."""
        life = self.life

        def advance(result: Any) -> None:
            try:
                waiting = activity.send(result)
            except StopIteration:
                ended()
            else:
                waiting(resume)

        def resume(result: Any) -> None:
            if self.life != life:
                return
            if self.loop.now < self._frozen_until:
                self.loop.after(self._frozen_until - self.loop.now, lambda: resume(result))
            else:
                advance(result)

        advance(None)

    def wait(self, seconds: float) -> Waiting:
        """Wait for a time: after `yield self.wait(2.5)` the activity continues 2.5 simulated seconds later."""
        return lambda resume: self.loop.after(seconds, lambda: resume(None))

    def all_of(self, activities: Sequence[Activity]) -> Waiting:
        """Begin these activities in order; after `yield self.all_of(activities)`, all of them have ended."""
        left = len(activities)

        def begin(resume: Resume) -> None:
            def ended() -> None:
                nonlocal left
                left -= 1
                if not left:
                    resume(None)

            for activity in activities:
                self.run(activity, ended)

        return begin
