"""Backoff: a call that fails is repeated after pauses, each twice as long as the one before."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

Answer = TypeVar("Answer")
Failure = TypeVar("Failure", bound=Exception)


class Backoff(NamedTuple):
    """Seconds of the first and of the longest pause."""

    first: float
    longest: float = math.inf

    def pause(self, failures: int) -> float:
        """Seconds of the pause after so many failures in a row.

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
    """Call until there is an answer; one of `errors` is followed by another try.

    The error is raised after so many tries, and where it comes more than `within` seconds after the first call. Before
    each pause `failed` is given the error; it may raise another one.
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
