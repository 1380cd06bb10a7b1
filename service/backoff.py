"""Backoff: a failed call is retried after pauses, each twice as long as the previous one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

Answer = TypeVar("Answer")
Failure = TypeVar("Failure", bound=Exception)


class Backoff(NamedTuple):
    """Length of the first pause and maximum length of a pause, in seconds."""

    first: float
    longest: float = math.inf

    def pause(self, failures: int) -> float:
        """Seconds of the pause after `failures` consecutive failures.

        >>> [Backoff(0.5, 3.0).pause(failures) for failures in (1, 2, 3, 4, 5000)]
        [0.5, 1.0, 2.0, 3.0, 3.0]
        """
        doublings = min(failures - 1, 64)
        return min(self.first * 2.0**doublings, self.longest)


async def retried(
    call: Callable[[], Awaitable[Answer]],
    errors: type[Failure] | tuple[type[Failure], ...],
    backoff: Backoff,
    *,
    within: float = math.inf,
    tries: float = math.inf,
    failed: Callable[[Failure], None] = lambda error: None,
) -> Answer:
    """Call until there is an answer; retry after each of `errors`.

    The error is raised after `tries` tries, or if it comes more than `within` seconds after the first call. Before
    each pause `failed` is called with the error; it may raise another error.
    """
    began, failures = time.monotonic(), 0
    while True:
        try:
            return await call()
        except errors as error:
            failures += 1
            if failures >= tries or time.monotonic() - began > within:
                raise
            failed(error)
        await asyncio.sleep(backoff.pause(failures))
