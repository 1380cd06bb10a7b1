"""A thread for the calls of one episode into a library that blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class OwnThread:
    """A thread of its own, so that a call that hangs takes no thread from the engine or another episode."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="environment")

    async def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call in the thread; also a cancelled call ends with its thread, so that a thread that hangs is noticed."""
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._executor, partial(function, *arguments, **named))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await asyncio.wait([answer])
            raise

    def end(self) -> None:
        """End the thread after its last call."""
        self._executor.shutdown(wait=False)
