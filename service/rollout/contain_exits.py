"""An exit inside a task that an environment starts fails what waits for the task, and does not end the event loop.

asyncio lets SystemExit and KeyboardInterrupt of any task through to its event loop, which ends with all trajectories.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

from service.rollout.traceback import describe_error

_CONTAINED = ContextVar("contained", default=False)
"""True in the task that called `contain_exits`, and in all that it starts."""


def contain_exits() -> None:
    """Make exits ordinary errors in all tasks that the current task starts from now on."""
    _CONTAINED.set(True)
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
    inside = asyncio.iscoroutine(coroutine) and _CONTAINED.get()
    return asyncio.Task(_Contained(coroutine) if inside else coroutine, loop=loop, **more)


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine whose SystemExit and KeyboardInterrupt are ordinary errors."""

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner

    def send(self, value: Any) -> Any:
        return self._contained(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._contained(self._inner.throw, *error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()

    def _contained(self, go_on: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return go_on(*arguments)
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(describe_error(error)) from None
