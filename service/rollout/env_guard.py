"""Runs a trajectory's environment in a guarded task: if its code fails or hangs, other trajectories go on.

    agent loop --reset, step, close--> task of the environment: runs its code, then copies the result
               <--plain values, or why the trajectory fails--

All code of the environment runs in one asyncio task, for the whole episode. The agent loop waits for an answer only
until a deadline, and never for the end of the task. A task that does not end when cancelled is abandoned and counted.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from service.errors import RunFailed
from service.handoff.steps.values import StopReason
from service.rollout.engine import AgentLimits
from service.rollout.environment import (
    Agent,
    AgentSession,
    Environment,
    Message,
    OversizedOutput,
    StepResult,
    Task,
    TrajectoryFailed,
)
from service.rollout.plain_values import NotAllowed, read_messages, read_step_result
from service.rollout.user_errors import contain_exits, describe_error, type_name
from service.types import TrajectoryId

log = logging.getLogger(__name__)

RETURN_SECONDS = 5.0
"""Seconds in which a cancelled call must return and the environment must close; afterwards its task is abandoned."""
MAX_LEAKED_TASKS = 100
"""Maximum number of abandoned environment tasks in a process. With more, the process must be restarted."""
FINISH_SECONDS = 60.0
"""Seconds in which the event loop must have run a `finish` that an agent called in a thread."""
_TOOL = re.compile(r'<tool_call>\s{0,8}\{\s{0,8}"name"\s{0,8}:\s{0,8}"([\w.-]{1,64})"')
_NAME = re.compile(r"[\w.-]{1,64}")


class LeakedTasks:
    """The abandoned environment tasks: tasks that did not return after they were cancelled. A task that returns later
    is removed."""

    def __init__(self) -> None:
        self.names: dict[asyncio.Task[None], str] = {}

    def __len__(self) -> int:
        return len(self.names)

    def add(self, task: asyncio.Task[None], name: str) -> None:
        """Count an abandoned task of the environment `name` until the task returns."""
        self.names[task] = name
        task.add_done_callback(self.names.pop)

    def check(self) -> None:
        """Raise `RunFailed` if too many abandoned tasks have not returned."""
        if len(self) > MAX_LEAKED_TASKS:
            names = ", ".join(f"{n} of {name}" for name, n in Counter(self.names.values()).most_common(3))
            raise RunFailed(
                f"{len(self)} episodes did not return after they were cancelled ({names}); their environment swallows "
                "asyncio.CancelledError, or a library that it calls hangs: let it pass, or set env.isolation to process"
            )


class _EnvironmentCall(NamedTuple):
    method: str
    """The method's name, for error messages."""
    make: Callable[[Any], Awaitable[Any]]
    """Makes the call, given the environment."""
    read: Callable[[Any], Any]
    answer: asyncio.Future[Any]
    """The plain result, or a `TrajectoryFailed`."""


class EnvGuard:
    """Runs one trajectory's environment. `make`: makes the environment; `name`: the environment's name.

    `reset`, `step` and `play` raise TrajectoryFailed if the environment raised an error, missed
    its deadline, or returned a value that is not allowed.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Environment | Agent],
        limits: AgentLimits,
        leaked: LeakedTasks | None = None,
        answered: Callable[[str, float], None] | None = None,
    ) -> None:
        """`answered`: called after each call of the environment (except `play`), with the call's name and start
        time."""
        self.name = name
        self._make = make
        self._limits = limits
        self._leaked = LeakedTasks() if leaked is None else leaked
        self._answered = answered
        self._calls: asyncio.Queue[_EnvironmentCall | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._gave_up = False
        """Whether the task was cancelled during a call. The call may still run."""
        self._tools: frozenset[str] = frozenset()
        """Names of the tools that the task describes."""

    async def reset(self, task: Task, seed: int) -> list[Message]:
        """Make the environment, begin the episode and return the first messages."""
        self._tools = frozenset(name for tool in task.tools if (name := _name_of(tool)))
        read = partial(read_messages, "messages", self._limits)
        messages: list[Message] = await self._ask("reset", lambda environment: environment.reset(task, seed), read)
        return messages

    async def step(self, text: str) -> StepResult:
        """The environment's answer to one turn of the policy, copied into plain values."""
        read, name = partial(read_step_result, self._limits), tool_named(text, self._tools)
        result: StepResult = await self._ask("step", lambda environment: environment.step(text), read, name)
        return result

    async def play(
        self, session: AgentSession, task: Task, seed: int, resumes: bool = False, spent: float = 0.0
    ) -> None:
        """Make the agent and call its `play`, or `resume`; the agent gives its result to the session. `spent`: seconds
        of its deadline that have passed."""
        method = "resume" if resumes else "play"
        await self._ask("play", lambda agent: call_agent(getattr(agent, method), session, task, seed), spent=spent)

    async def close(self, trajectory: TrajectoryId) -> None:
        """End the episode. Errors are only logged, because the trajectory is already over."""
        if self._task is None:
            return
        self._calls.put_nowait(None)
        seconds = self._limits.step_deadline
        seconds = min(seconds, RETURN_SECONDS) if self._gave_up else seconds
        try:
            await asyncio.wait({self._task}, timeout=seconds)
        finally:
            if not self._task.done():
                if not self._gave_up:
                    self._task.cancel()
                self._leaked.add(self._task, self.name)
                log.warning("%s: %s was abandoned, it did not end within %g s", trajectory, self.name, seconds)

    async def _ask(
        self,
        method: str,
        make: Callable[[Any], Awaitable[Any]],
        read: Callable[[Any], Any] = lambda result: None,
        name: str = "",
        spent: float = 0.0,
    ) -> Any:
        """Call a method and return a copy of its result, made by `read`; `name`: the call's name in the timeline, by
        default `method`; `spent`: seconds of its deadline that have passed."""
        loop = asyncio.get_running_loop()
        if self._task is None:
            self._task = loop.create_task(self._serve(), name=self.name)
        answer: asyncio.Future[Any] = loop.create_future()
        began, deadline = time.monotonic(), self._limits.step_deadline
        self._calls.put_nowait(_EnvironmentCall(method, make, read, answer))
        either: set[asyncio.Future[Any]] = {answer, self._task}
        try:
            await asyncio.wait(either, timeout=deadline - spent, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when the trajectory is cancelled
            if self._answered is not None and method != "play":  # this call lasts as long as the trajectory
                self._answered(name or method, began)
            if not answer.done():
                self._gave_up = True
                self._task.cancel()
        if answer.done():
            result = answer.result()
        elif self._task.done():
            result = self._failed(StopReason.ENVIRONMENT_ERROR, method, "it cancelled its own task")
        else:
            result = self._failed(StopReason.ENVIRONMENT_TIMEOUT, method, f"no answer after {deadline:g} s")
        if isinstance(result, TrajectoryFailed):
            raise result
        return result

    async def _serve(self) -> None:
        """The body of the environment's task: makes one call after the other, then closes the environment."""
        contain_exits()
        environment: Any = None
        while (call := await _next(self._calls)) is not None:
            try:
                if environment is None:
                    environment = self._make()
                answer = call.read(await call.make(environment))
            except BaseException as error:  # noqa: BLE001 - code of users and policies may raise anything, SystemExit too
                answer = self._failure(call.method, error)
            if not call.answer.done():  # the caller waited until the deadline, or until the trajectory was cancelled
                call.answer.set_result(answer)
            if (task := asyncio.current_task()) is not None:
                for _ in range(task.cancelling()):
                    task.uncancel()  # else a deadline inside of `close` would not work
        try:
            if hasattr(environment, "close"):  # an agent may have no `close`
                await environment.close()
        except BaseException as error:  # noqa: BLE001 - as above
            log.warning("an episode did not close: %s", self._failure("close", error))

    def _failure(self, method: str, error: BaseException) -> TrajectoryFailed:
        """The `TrajectoryFailed` for this error of the environment."""
        kind = type(error)  # `isinstance` would run code of the error's class
        if kind is NotAllowed:
            return self._failed(error.reason, method, error.detail)  # type: ignore[attr-defined]
        if issubclass(kind, asyncio.CancelledError):
            return self._failed(StopReason.ENVIRONMENT_ERROR, method, "what it waited for was cancelled")
        oversized = issubclass(kind, OversizedOutput)
        reason = StopReason.ENVIRONMENT_OUTPUT if oversized else StopReason.ENVIRONMENT_ERROR
        return self._failed(reason, method, describe_error(error), type_name(error))

    def _failed(self, reason: StopReason, method: str, detail: str, error: str = "") -> TrajectoryFailed:
        return TrajectoryFailed(reason, f"{self.name}.{method}: {detail}", error=error)


def tool_named(text: str, tools: Container[str]) -> str:
    """Name of the tool that a response calls first, as in `<tool_call>{"name": "search", ..}`. The result is `step` if
    there is no call, or if `tools` lacks the name: a name that the policy made up must not become a metric's label."""
    found = _TOOL.search(text) if "<tool_call>" in text else None
    return found[1] if found is not None and found[1] in tools else "step"


def _name_of(tool: Mapping[str, Any]) -> str | None:
    """The tool's name in a description such as `{"type": "function", "function": {"name": "search", ..}}`."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and _NAME.fullmatch(name) else None


async def _next(calls: asyncio.Queue[_EnvironmentCall | None]) -> _EnvironmentCall | None:
    """The next call of the environment; None after the last call, or if the task was cancelled between two calls."""
    try:
        return await calls.get()
    except asyncio.CancelledError:
        return None


async def call_agent(play: Callable[..., Any], session: AgentSession, task: Task, seed: int) -> None:
    """Call an agent's `play` or `resume`: in this task if it is a coroutine function, else in a thread.

    A thread cannot be ended from outside. So after a first cancellation this function waits until the thread ends. A
    second cancellation ends the wait.
    """
    if inspect.iscoroutinefunction(play):
        await play(session, task, seed)
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[BaseException | None] = loop.create_future()

    def run() -> None:
        error: BaseException | None = None
        try:
            play(_SessionOfThread(session, loop), task, seed)
        except BaseException as raised:  # noqa: BLE001 - raised again in the task that waits
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(ended.set_result, error)

    threading.Thread(target=run, name=f"play-{task.uid}", daemon=True).start()
    try:
        error = await asyncio.shield(ended)
    except asyncio.CancelledError:
        await asyncio.shield(ended)
        raise
    if error is not None:
        raise error


class _SessionOfThread:
    """A session for use in a thread: its `finish` runs in the thread of the event loop."""

    def __init__(self, session: AgentSession, loop: asyncio.AbstractEventLoop) -> None:
        self.base_url, self.key = session.base_url, session.key
        self._session, self._loop = session, loop

    def finish(self, *arguments: Any, **named: Any) -> None:
        """Call the session's `finish` in the event loop; raises its errors."""

        async def finish() -> None:
            self._session.finish(*arguments, **named)

        asyncio.run_coroutine_threadsafe(finish(), self._loop).result(FINISH_SECONDS)
