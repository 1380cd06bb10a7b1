"""A thread for the calls of one episode: a call that hangs in it blocks neither the engine nor other episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class OwnThread:
    """One thread for one episode."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="environment")

    async def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function in the thread. A cancelled call still waits until the function has returned, so that Baton
        counts a thread that hangs."""
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._executor, partial(function, *arguments, **named))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await asyncio.wait([answer])
            raise

    def end(self) -> None:
        """End the thread when its last call has returned."""
        self._executor.shutdown(wait=False)
