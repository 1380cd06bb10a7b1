"""asyncio in virtual time: a loop that sleeps by moving its clock, and processes that are killed or stand still.

Every task and timer belongs to the process in whose context it began; the driver's belong to none. A process that is
killed gets no further line of code; one that stands still gets its timers and answers when it goes on.
"""

import asyncio
import contextvars
import weakref
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from itertools import count
from typing import Any

from service.errors import BatonError

START = 1000.0
"""The monotonic clock's time at which a loop begins."""


class Hung(BatonError):
    """Nothing is left that could happen."""


class SimProcess:
    """A made process of an operating system."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive, self.stands_still = True, False
        self.held: list[asyncio.Handle] = []
        """What waits until the process goes on."""
        self.tasks = weakref.WeakSet[asyncio.Task[Any]]()

    def context(self) -> contextvars.Context:
        """A context for code of this process."""
        context = contextvars.Context()
        context.run(PROCESS.set, self)
        return context

    def kill(self) -> None:
        """End every task, as kill -9 does for whoever looks from outside: no call or answer leaves any more."""
        self.alive = False
        self.goes_on()
        for task in list(self.tasks):
            task.cancel()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stands_still = True

    def goes_on(self) -> None:
        """SIGCONT."""
        self.stands_still = False
        held, self.held = self.held, []
        for handle in held:
            handle._loop._ready.append(handle)  # type: ignore[attr-defined]


PROCESS = contextvars.ContextVar[SimProcess | None]("PROCESS", default=None)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose seconds pass at once; no file is ever ready."""

    def __init__(self, now: float = START) -> None:
        self.now = now
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """A heap; the second number keeps timers of the same time in their order."""
        self._numbers = count()
        super().__init__()
        self.set_task_factory(_task_of_its_process)  # type: ignore[arg-type]

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        while timers and timers[0][2].cancelled():
            heappop(timers)
        if not ready:
            if not timers:
                raise Hung("every task waits, and no timer is set")
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def time(self) -> float:
        """Virtual seconds; `time.monotonic` is patched to it while a world runs."""
        return self.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Run a callback next, or when its process goes on."""
        process = PROCESS.get() if context is None else context.get(PROCESS)
        handle = asyncio.Handle(callback, args, self, context)
        if process is None or not process.stands_still:
            self._ready.append(handle)  # type: ignore[attr-defined]
        else:
            process.held.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback at a time, unless its process has ended; later if its process stands still then."""
        process = PROCESS.get() if context is None else context.get(PROCESS)

        def due() -> None:
            if process is not None and process.stands_still:
                process.held.append(timer)
            else:
                callback(*args)

        timer = asyncio.TimerHandle(when, due, (), self, context)
        heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call a function at once."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised to who waits
            done.set_exception(error)
        return done


def _task_of_its_process(loop: VirtualLoop, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(coro, loop=loop, **options)
    process = PROCESS.get() if options.get("context") is None else options["context"].get(PROCESS)
    if process is not None:
        process.tasks.add(task)
        if not process.alive:
            task.cancel()
    return task
