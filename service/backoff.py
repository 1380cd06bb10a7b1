"""Retries failed calls after pauses; each pause is twice as long as the previous pause."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

Answer = TypeVar("Answer")
Failure = TypeVar("Failure", bound=Exception)


class Backoff(NamedTuple):
    """Lengths of the pauses between retries: the first pause and the longest pause, in seconds."""

    first: float
    longest: float = math.inf

    def pause(self, failures: int) -> float:
        """Length in seconds of the pause after `failures` consecutive failures.

        >>> [Backoff(0.5, 3.0).pause(failures) for failures in (1, 2, 3, 4, 5000)]
        [0.5, 1.0, 2.0, 3.0, 3.0]
        """
        return min(self.first * 2.0 ** min(failures - 1, 64), self.longest)


async def retried(
    call: Callable[[], Awaitable[Answer]],
    errors: type[Failure] | tuple[type[Failure], ...],
    backoff: Backoff,
    *,
    within: float = math.inf,
    tries: float = math.inf,
    failed: Callable[[Failure], None] = lambda error: None,
) -> Answer:
    """The answer of `call`, which is called again after a pause each time it raises an error of the types `errors`.

    The error is raised after `tries` calls, or more than `within` seconds after the first call. Before each pause
    `failed` is called with the error; `failed` may raise another error.
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
