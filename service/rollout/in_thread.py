"""Plays an agent whose `play` is a plain function, in a thread of its own: the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from service.rollout.environment import Agent, AgentSession, Task

FINISH_SECONDS = 60.0
"""Seconds in which the event loop must take the end of a session."""


async def played(agent: Agent, session: AgentSession, task: Task, seed: int) -> None:
    """Let an agent play: in this task if its `play` is a coroutine function, else in a thread.

    A thread cannot be ended: after a cancellation this waits for its end, until it is cancelled again.
    """
    play: Callable[[AgentSession, Task, int], Any] = agent.play
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
    """A session as a thread uses it: it ends in the thread of the event loop."""

    def __init__(self, session: AgentSession, loop: asyncio.AbstractEventLoop) -> None:
        self.base_url, self.key = session.base_url, session.key
        self._session, self._loop = session, loop

    def finish(self, *arguments: Any, **named: Any) -> None:
        """Same as the session's own `finish`, with its errors."""

        async def finish() -> None:
            self._session.finish(*arguments, **named)

        asyncio.run_coroutine_threadsafe(finish(), self._loop).result(FINISH_SECONDS)
