"""Calls the `play` of an agent in a separate thread if `play` is a plain function, so that it does not block the event
loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from service.rollout.environment import AgentSession, Task

FINISH_SECONDS = 60.0
"""Seconds in which the event loop must process an agent's call of `finish`."""


async def played(play: Callable[..., Any], session: AgentSession, task: Task, seed: int) -> None:
    """Call an agent's `play` or `resume`: in this task if it is a coroutine function, else in a thread.

    A thread cannot be ended from outside. After a first cancellation this function therefore waits until the thread
    ends; a second cancellation ends the wait.
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
