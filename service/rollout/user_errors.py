"""Handles errors of users' code: describes an error in one line with file and line number, and turns SystemExit and
KeyboardInterrupt into ordinary errors.

If a task raises SystemExit or KeyboardInterrupt, asyncio raises the error again in the event loop. This would end the
loop and all trajectories.
"""

from __future__ import annotations

import asyncio
import os
from contextvars import ContextVar
from inspect import CORO_CREATED, getcoroutinestate
from itertools import dropwhile
from traceback import walk_tb
from types import CoroutineType, TracebackType
from typing import Any

MAX_CHARACTERS = 500
"""Maximum characters of an error's message; longer messages are cut."""
MAX_NAME_CHARACTERS = 80

HERE = os.path.dirname(__file__)
CALLERS = (HERE, os.path.join(HERE, "environments"), os.path.join(os.path.dirname(HERE), "scorers"))
"""Folders of the code that calls users' code."""


def describe_error(error: BaseException) -> str:
    """One line with the type, the message and the place of an error: `KeyError: 'age' (my_envs.py:12)`. The place is
    the line of the user's code that was called, and then the line that raised the error, if it is another line."""
    name = type_name(error)
    try:
        text = f"{name}: {error}"[:MAX_CHARACTERS]
    except BaseException:  # noqa: BLE001 - the `__str__` of a user's exception class may raise anything
        return name
    # Not `error.__traceback__`, which a user's class may redefine.
    traceback: TracebackType | None = BaseException.__dict__["__traceback__"].__get__(error)
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(traceback)]
    outside = dropwhile(lambda frame: os.path.dirname(frame[0]) in CALLERS, frames)  # outermost frame first
    places = [f"{os.path.basename(file)}:{line}" for file, line in outside]
    if places:
        text += f" ({places[0]})" if places[0] == places[-1] else f" ({places[0]}, in {places[-1]})"
    return text


def type_name(value: object) -> str:
    """The name of a value's class, even if a metaclass defines `__name__`."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return str.__str__(name)[:MAX_NAME_CHARACTERS]


_CONTAINED = ContextVar("contained", default=False)
"""True in the task that called `contain_exits`, and in all tasks that it starts."""


def contain_exits() -> None:
    """Turn SystemExit and KeyboardInterrupt into ordinary errors in all tasks that the current task starts from now
    on."""
    _CONTAINED.set(True)
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
    if not (asyncio.iscoroutine(coroutine) and _CONTAINED.get()):
        return asyncio.Task(coroutine, loop=loop, **more)

    def close(task: object) -> None:
        # A task that was cancelled before its first line leaves its coroutine open. Closing it runs no code of users.
        if type(coroutine) is CoroutineType and getcoroutinestate(coroutine) == CORO_CREATED:
            coroutine.close()

    task = asyncio.Task(_contained(coroutine), loop=loop, **more)
    task.add_done_callback(close)
    return task


async def _contained(coroutine: Any) -> Any:
    """The result of a coroutine. A SystemExit or KeyboardInterrupt that it raises becomes an ordinary error."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(describe_error(error)) from None
