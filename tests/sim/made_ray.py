"""What a run uses of Ray, in virtual time: actors that die, restart without their state, stand still, or cannot be
reached, and their handles.

As measured of Ray (and as its sources say):

death                    calls under way fail with ActorDiedError; with `retries` the next process gets them, but for
                         a method without retries
no process               calls fail with ActorUnavailableError; with `retries` of the actor they wait for the next
not yet made             calls wait
SIGSTOP                  nothing is answered and nothing fails
lost connection          the driver's calls under way fail with ActorUnavailableError, though they go on at the actor
ordered actors           one call at a time for each concurrency group
result of a method       stays in the object store when its process dies
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray.exceptions

from service.run.liveness.supervisor import Life
from tests.sim.virtual_asyncio import PROCESS, SimProcess, VirtualLoop

NOTICE_SECONDS = 0.1
"""Seconds from a death to the errors of its calls."""
OFTEN = "life"
"""The method that is called so often that half of all events would be about it."""
ANSWERED_SECONDS = 1.5
"""Seconds after which a new process has answered something."""
ANSWER_SECONDS = 0.002
"""Seconds that an answer travels, with the call."""


@dataclass(eq=False)
class Call:
    """A call of an actor's method."""

    method: str
    arguments: tuple[Any, ...]
    caller: SimProcess | None
    answers: list[asyncio.Future[Any]]
    is_repeated: bool
    """By the next process, if this one dies."""
    is_over: bool = False

    def settle(self, error: BaseException | None, results: tuple[Any, ...] = ()) -> None:
        """Give the answer, if there is none yet and the caller still lives."""
        if self.is_over:
            return
        self.is_over = True
        for number, answer in enumerate(self.answers):
            if answer.done():
                continue
            if error is None:
                answer.set_result(results[number])
            else:
                answer.set_exception(error)


class Handle:
    """An actor as others call it: `handle.method.remote(...)`."""

    def __init__(self, actor: MadeActor) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        return _Method(self._actor, method)


@dataclass(frozen=True)
class _Method:
    actor: MadeActor
    name: str

    def remote(self, *arguments: Any) -> Any:
        answers = self.actor.called(self.name, arguments)
        return answers[0] if len(answers) == 1 else tuple(answers)


@dataclass(eq=False)
class MadeActor:
    """An actor: its processes, one after the other, and the calls that it has not answered."""

    ray: MadeRay
    name: str
    of: type
    make: Callable[[], Any]
    restart_seconds: float
    retries: bool = False
    is_ordered: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long a method takes, before it is done in no time."""
    died: Callable[[Any], None] = lambda body: None
    """Called with what a process was when it dies."""
    process: SimProcess | None = None
    body: Any = None
    restarts: int = 0
    is_gone: bool = False
    """For good."""

    def __post_init__(self) -> None:
        self.handle = Handle(self)
        self._waiting: list[Call] = []
        self._under_way: dict[Call, SimProcess] = {}
        self._was_made, self._began = False, 0.0
        self._locks: dict[str, asyncio.Lock] = {}
        self._comes: Callable[[], None] | None = None

    # -- its processes ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a process."""
        self.process, self._was_made, self._began = SimProcess(self.name), True, self.ray.loop.time()
        self._locks = defaultdict(asyncio.Lock)
        self.body = self.process.context().run(self.make)
        self.ray.processes[self.body._process] = "cannot be reached"
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._begin(call)
        if self._comes is not None:
            comes, self._comes = self._comes, None
            comes()

    def die(self, restarts: bool = True, cause: str | None = "its process died: kill -9") -> None:
        """End its process; Ray starts another one unless it was told not to. `cause`: see `MadeRay.processes`."""
        self.is_gone |= not restarts
        if self.process is None:
            return
        self.ray.processes[self.body._process] = cause
        process, self.process, body, self.body = self.process, None, self.body, None
        process.kill()
        self.died(body)
        self._lose([call for call, of in self._under_way.items() if of is process])
        if restarts:
            self.ray.later(self.restart_seconds, self._restart)

    def stand_still(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so many seconds."""
        if self.process is not None:
            self.process.stop()
            self.ray.later(seconds, self.process.goes_on)

    def _restart(self) -> None:
        if not self.is_gone:
            self.restarts += 1
            self.start()

    def strike(self, blow: Callable[[], None]) -> None:
        """Do something to its process: now, or once there is one that has answered; before that it is still the
        process that others miss."""
        if self.process is None:
            self._comes = partial(self.strike, blow)
        elif (seconds := self._began + ANSWERED_SECONDS - self.ray.loop.time()) > 0:
            self.ray.later(seconds, partial(self.strike, blow))
        else:
            blow()

    # -- its calls ----------------------------------------------------------------------------------------------------

    def called(self, method: str, arguments: tuple[Any, ...]) -> list[asyncio.Future[Any]]:
        """Take a call; returns what its answers will be."""
        function, caller, loop = getattr(self.of, method), PROCESS.get(), self.ray.loop
        answers: list[asyncio.Future[Any]] = []
        for _ in range(getattr(function, "__ray_num_returns__", 1)):
            answer: asyncio.Future[Any] = loop.create_future()
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            answers.append(answer)
        call = Call(
            method, arguments, caller, answers, getattr(function, "__ray_max_task_retries__", self.retries) != 0
        )
        if caller is not None and not caller.alive:
            for answer in answers:
                answer.cancel()
            return answers
        self.ray.called(self.name, method)
        self._send(call)
        return answers

    def _send(self, call: Call) -> None:
        if self.is_gone:
            self._fail(call, ray.exceptions.ActorDiedError())
        elif call.caller is None and self.ray.is_cut and not self.retries:
            self._fail(call, ray.exceptions.ActorUnavailableError(f"{self.name} cannot be reached", None))
        elif (call.caller is None and self.ray.is_cut) or (self.process is None and not self._was_made):
            self._waiting.append(call)
        elif self.process is not None:
            self._begin(call)
        elif self.retries:
            self._waiting.append(call)
        else:
            self._fail(call, ray.exceptions.ActorUnavailableError(f"{self.name} is restarting", None))

    def _fail(self, call: Call, error: Exception, after: float = ANSWER_SECONDS) -> None:
        self.ray.later(after, partial(call.settle, error))

    def _lose(self, calls: list[Call]) -> None:
        """Calls whose process died."""
        for call in calls:
            del self._under_way[call]
            if self.is_gone or not call.is_repeated:
                self._fail(call, ray.exceptions.ActorDiedError(), NOTICE_SECONDS)
            else:
                self.ray.later(NOTICE_SECONDS, partial(self._send, call))

    def cut(self) -> None:
        """The driver lost its connection: it gets no answer to what is under way here."""
        for call in [call for call in self._under_way if call.caller is None]:
            if call.is_repeated:
                del self._under_way[call]
                self._waiting.append(call)  # made again, though it may be done already
            else:
                self._fail(call, ray.exceptions.ActorUnavailableError(f"lost contact with {self.name}", None))

    def reached_again(self) -> None:
        """The driver's connection is back."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._send(call)

    def _begin(self, call: Call) -> None:
        process = self.process
        assert process is not None
        self._under_way[call] = process
        if call.method == OFTEN and not process.stands_still:
            self.ray.later(ANSWER_SECONDS, partial(self._answer_at_once, call, self.body))
        else:
            process.context().run(self.ray.loop.create_task, self._answer(call, process, self.body))

    def _answer_at_once(self, call: Call, body: Any) -> None:
        """Answer without a task of the process, for a method that waits for nothing."""
        if self._under_way.pop(call, None) is not None:
            result = getattr(body, call.method)()
            if inspect.iscoroutine(result):
                try:
                    result.send(None)
                except StopIteration as done:
                    result = done.value
            call.settle(None, (result,))

    async def _answer(self, call: Call, process: SimProcess, body: Any) -> None:
        error, results = None, ()
        try:
            results = await self._done(call, body)
        except Exception as raised:  # noqa: BLE001 - as Ray does, for the caller
            error = raised
        if not process.alive:
            return
        await asyncio.sleep(ANSWER_SECONDS)
        if self._under_way.pop(call, None) is None:
            return  # the connection was lost meanwhile
        if error is not None and not isinstance(error, ray.exceptions.RayError):
            error = ray.exceptions.RayTaskError(call.method, str(error), error).as_instanceof_cause()
        call.settle(error, results)
        self.ray.answered(self.name, call.method, call.arguments, None if error else results)

    async def _done(self, call: Call, body: Any) -> tuple[Any, ...]:
        arguments = [await each if isinstance(each, asyncio.Future) else each for each in call.arguments]
        function = getattr(body, call.method)
        group = getattr(function, "__ray_concurrency_group__", "") if self.is_ordered else str(id(call))
        async with self._locks[group] if self.is_ordered else asyncio.Lock():
            if call.method in self.seconds:
                await asyncio.sleep(self.seconds[call.method])
            if hasattr(body, "before"):
                await body.before(call.method)
            result = function(*arguments)
            if inspect.isawaitable(result):
                result = await result
        return (result,) if len(call.answers) == 1 else tuple(result)


class MadeRay:
    """All actors by name, and the functions of `ray` that Baton calls."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.actors: dict[str, MadeActor] = {}
        self.processes: dict[str, str | None] = {}
        """Why each process ended, by its id; None: the run has ended it."""
        self.is_cut = False
        """Whether the driver has no connection."""
        self.called: Callable[[str, str], None] = lambda actor, method: None
        self.answered: Callable[[str, str, tuple[Any, ...], tuple[Any, ...] | None], None] = lambda *told: None
        """Called with actor, method, arguments and results; None for an error."""

    def later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call a function of Ray's own processes, which nobody kills."""
        self.loop.call_later(seconds, callback, context=Context())

    def add(self, actor: MadeActor, seconds: float) -> Handle:
        """Begin an actor, whose first process is there after so many seconds."""
        self.actors[actor.name] = actor
        self.later(seconds, actor.start)
        return actor.handle

    def cut(self, seconds: float) -> None:
        """Break the driver's connection for so many seconds."""
        self.is_cut = True
        for actor in self.actors.values():
            actor.cut()
        self.later(seconds, self._reconnect)

    def _reconnect(self) -> None:
        self.is_cut = False
        for actor in self.actors.values():
            actor.reached_again()

    def get_actor(self, name: str) -> Handle:
        """As `ray.get_actor`."""
        return self.actors[name].handle

    def kill(self, handle: Handle, no_restart: bool = True) -> None:
        """As `ray.kill`."""
        handle._actor.die(not no_restart, cause=None)

    def restarts(self, handle: Handle) -> bool:
        """As `actors.deaths._restarts`."""
        return handle._actor.process is None

    async def cause_of_death(self, name: str, last: Life) -> str | None:
        """As `actors.deaths.cause_of_death`."""
        return self.processes[last.process]
