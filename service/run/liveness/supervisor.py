"""Checks whether each process of a run is alive and set up. Cancels work that waits for a process that died.

Each second every actor of the run is asked: "which process are you, and are you set up?"

answer                                                      consequence
no process, another process, or one that is not set up      the earlier process is lost: work that waits for it gets
                                                            `ProcessLost`; if no work waits, the cause is printed
still no process                                            a line is printed every `AGAIN_SECONDS`
no answer for `SILENT_SECONDS`                              a line is printed, and again every `AGAIN_SECONDS`
no answer within the actor's deadline                       work that waits for the actor gets `ProcessLost`
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from service.errors import ProcessLost, Starved
from service.run.liveness.host_memory import Memory, warning

PROBE_SECONDS = 1.0
"""Seconds between an answer of a process and the next question."""
SILENT_SECONDS = 10.0
"""Seconds without an answer after which a line about the process is printed. (A busy process may answer late.)"""
AGAIN_SECONDS = 20.0
"""Seconds after which the line about a process is printed again, as long as the process does not answer."""
CAUSE_SECONDS = 2.5
"""After a failed call: seconds to wait for a health check to find the cause, because the process may have died."""
LIVED_SECONDS = 10.0
"""The death of a process that lived longer, in seconds, is always printed. If several processes of an actor die
younger, only some of their deaths are printed."""
CANCEL_SECONDS = 30.0
"""Seconds in which cancelled work has to end."""

Answer = TypeVar("Answer")


class Life(NamedTuple):
    """The answer of an actor's process to a health check."""

    process: str
    """An id that no other process has."""
    is_set_up: bool
    """Whether the process has received everything that its work needs. (A process that was just restarted has nothing
    yet.)"""
    memory: Memory | None = None
    """The memory that the process uses; None if it was not measured."""


Probe = Callable[[], Awaitable[Life | None]]
"""A function that asks an actor for its `Life`; it returns None if the actor has no process."""
Cause = Callable[[str, Life], Awaitable[str | None]]
"""A function that returns how an actor's process ended, as in "died"; None if the run itself ended the process.
Arguments: the actor's name, and the last answer of the process."""


class Supervisor:
    """Checks the processes of all actors of a run, as long as the run lasts."""

    def __init__(self, say: Callable[[str], None], cause: Cause, is_death: Callable[[BaseException], bool]) -> None:
        """`is_death`: returns True for an error that a call of an actor may raise because the actor's process died.
        `cause`: returns how a process ended; `say`: prints a line."""
        self._say, self._cause, self._is_death = say, cause, is_death
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, Life | None] = {}
        """The last answer of each actor's process; None: the process is lost, and this was reported."""
        self._full: set[str] = set()
        """Hosts whose memory was too full at the last check."""
        self._waiting: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._born: dict[str, float] = {}
        """The time at which each actor's present process answered first."""
        self._deaths: Counter[str] = Counter()
        """Successive deaths of an actor's processes that lived for less than `LIVED_SECONDS`."""
        self.restarts: Counter[str] = Counter()
        """Processes that each actor has lost."""
        self._absent: dict[str, float] = {}
        """For each actor without a process: the time of the loss, or of the last line about it."""
        self._bug: BaseException | None = None
        """The error that ended the health checks of an actor."""

    def watch(self, name: str, probe: Probe, deadline: float = math.inf, hint: str = "") -> None:
        """Begin the health checks of an actor, unless it is checked already. `deadline`: seconds without an answer
        after which work that waits for the actor gets `ProcessLost`. `hint`: the usual reason for late answers, for
        messages."""
        if name not in self._asking:
            self._asking[name] = asyncio.ensure_future(self._watch(name, probe, deadline, hint))
            self._asking[name].add_done_callback(self._ended)

    def forget(self, name: str) -> None:
        """Stop the health checks of an actor, because it has left the run."""
        self._known.pop(name, None)
        self._absent.pop(name, None)
        if (asking := self._asking.pop(name, None)) is not None:
            asking.cancel()

    def stop(self) -> None:
        """Stop the health checks of all actors, because the run ends."""
        for name in [*self._asking]:
            self.forget(name)

    def lost(self) -> list[str]:
        """Names of the actors that have no process now, or whose process is not set up."""
        return sorted(name for name, life in [*self._known.items()] if life is None or not life.is_set_up)

    async def unless_lost(self, names: Sequence[str], work: Awaitable[Answer]) -> Answer:
        """Run `work`, which needs these actors, and return its result. If an actor is lost, cancel the work. If a
        health check itself raises an error, this error is raised too.

        Raises:
            ProcessLost: a process died, was restarted, or was silent for too long.
            RuntimeError: the work did not end after it was cancelled.
        """
        working = asyncio.ensure_future(work)
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        either: list[asyncio.Future[Any]] = [working, lost]
        for name in names:
            self._waiting[name].add(lost)
        if self._bug is not None:
            lost.set_exception(self._bug)
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and (error := working.exception()) is not None and self._is_death(error):
                await asyncio.wait([lost], timeout=CAUSE_SECONDS)
            if lost.done() and not (working.done() and working.exception() is None):
                lost.result()
            return working.result()
        finally:
            for name in names:
                self._waiting[name].discard(lost)
            for each in either:
                each.add_done_callback(lambda done: done.cancelled() or done.exception())
                each.cancel()
            if not (await asyncio.wait([working], timeout=CANCEL_SECONDS))[0]:
                raise RuntimeError(f"{working} goes on {CANCEL_SECONDS:.0f} s after it was cancelled")

    def report(self, name: str, error: BaseException) -> None:
        """Report that a call of this actor failed. The error is raised in all work that waits for the actor, unless a
        health check finds the cause first."""
        asyncio.get_running_loop().call_later(CAUSE_SECONDS, _give, error, [*self._waiting[name]])

    async def _watch(self, name: str, probe: Probe, deadline: float, hint: str) -> None:
        while True:
            waiting = [*self._waiting[name]]  # not work that begins to wait later
            try:
                life = await self._answer(name, probe, deadline)
                why = await self._why_lost(name, life, waits=any(not each.done() for each in waiting))
                self._say_if_absent(name, life)
            except Starved as silent:
                why, waiting = f"{silent}{hint}", [*self._waiting[name]]
            self._check_memory(self._known.get(name))
            if why is not None and not _give(ProcessLost(why), waiting):
                self._deaths[name] += 1
                if self._deaths[name].bit_count() == 1:  # print the 1st, 2nd, 4th ... of successive deaths
                    self._say(f"{why}; Ray starts it again")
            await asyncio.sleep(PROBE_SECONDS)

    def _say_if_absent(self, name: str, life: Life | None) -> None:
        """Print that an actor still has no process: the new process also died before it answered, or does not start."""
        now = asyncio.get_running_loop().time()
        if life is not None:
            self._absent.pop(name, None)
        elif now - self._absent.setdefault(name, now) >= AGAIN_SECONDS:
            self._absent[name] = now
            self._say(f"{name} still has no process")

    def _ended(self, asking: asyncio.Task[None]) -> None:
        if not asking.cancelled() and (bug := asking.exception()) is not None:
            self._bug = bug
            _give(bug, [each for waiting in self._waiting.values() for each in waiting])

    async def _answer(self, name: str, probe: Probe, deadline: float) -> Life | None:
        """Check once; print a line if there is no answer. (While an actor starts, its answer is late.) `Starved` if
        there was no answer within `deadline` and work waits for this actor."""
        asking, seconds, step = asyncio.ensure_future(probe()), 0.0, min(SILENT_SECONDS, deadline)
        try:
            while not (await asyncio.wait([asking], timeout=step))[0]:
                seconds += step
                if (seconds - step) % AGAIN_SECONDS < step and name in self._known:
                    self._say(f"{name} has not answered for {seconds:.0f} s")
                if seconds >= deadline and self._waiting[name]:
                    raise Starved(f"no answer of {name} for {seconds:.0f} s")
            return asking.result()
        finally:
            asking.cancel()

    def _check_memory(self, life: Life | None) -> None:
        """Print once that the memory of this process's host is nearly used up."""
        if life is None or life.memory is None:
            return
        host, known = life.memory.host, self._known.items()
        there = {name: each.memory for name, each in known if each and each.memory and each.memory.host == host}
        line = warning(there)
        if line is not None and host not in self._full:
            self._say(line)
        (self._full.discard if line is None else self._full.add)(host)

    async def _why_lost(self, name: str, life: Life | None, waits: bool) -> str | None:
        """Return why the process that answered before is lost. None if it is not lost, or if the run has ended it and
        no work waits for it."""
        is_new = name not in self._known
        before, self._known[name] = self._known.get(name), life
        if life is not None:
            self._count_life(name, is_same=before is not None and life.process == before.process)
        if before is not None and (life is None or life.process != before.process):
            ended = "cannot be reached" if life is None else "was ended by the run"
            cause = await self._cause(name, before) or (ended if waits else None)
            if cause is None:
                return None
            self.restarts[name] += 1
            return f"the process of {name} {cause}"
        if life is None and is_new:
            return f"the process of {name} died as it started"
        return f"{name} is not set up" if waits and (life is None or not life.is_set_up) else None

    def _count_life(self, name: str, is_same: bool) -> None:
        now = asyncio.get_running_loop().time()
        if not is_same:
            self._born[name] = now
        elif now - self._born[name] >= LIVED_SECONDS:
            del self._deaths[name]


def _give(error: BaseException, waiting: Iterable[asyncio.Future[None]]) -> bool:
    """Raise an error in all work that still waits. Returns whether any work waited."""
    left = [each for each in waiting if not each.done()]
    for each in left:
        each.set_exception(error)
    return bool(left)
