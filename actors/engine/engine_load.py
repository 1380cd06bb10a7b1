"""Measures the load of an engine: its requests and pauses, the use of its KV cache, and preemptions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

UNREPORTED = 4
"""Maximum number, per request in the engine, of preemptions by weight updates that vLLM has not reported yet."""


class EngineLoad(NamedTuple):
    """The load of an engine."""

    running: int
    """Number of requests in the batch."""
    waiting: int
    """Number of requests that wait for room in the batch."""
    kv_cache_ratio: float
    """Fraction of the KV cache in use."""
    preemptions: int
    """Number of preemptions because the KV cache was full. Preemptions by weight updates do not count."""


class Overflows:
    """Counts the preemptions that a full KV cache causes. A weight update also preempts all requests; these preemptions
    are not counted.

    vLLM reports a preemption only with the request's next token, in some later scheduler step, and without a reason.
    Here an update preempts 3 requests, and then vLLM reports 2 + 0 + 1 + 1 preemptions:

    >>> overflows = Overflows()
    >>> overflows.updated(running=3, waiting=0)
    >>> for reported in (2, 0, 1, 1): overflows.reported(reported)
    >>> overflows.preemptions
    1
    """

    def __init__(self) -> None:
        self.preemptions = 0
        self._by_updates = 0
        """Number of preemptions by updates that are not reported yet."""

    def updated(self, running: int, waiting: int) -> None:
        """Record that a weight update preempted the `running` requests. (vLLM may still report earlier preemptions of
        some of them.) `waiting`: the number of requests that wait for room in the batch."""
        # Cancelled requests report nothing: without a bound, the number of expected reports would only grow.
        self._by_updates = min(self._by_updates + running, UNREPORTED * (running + waiting))

    def reported(self, preemptions: int) -> None:
        """Count the preemptions that vLLM reported with one scheduler step."""
        by_updates = min(self._by_updates, preemptions)
        self._by_updates -= by_updates
        self.preemptions += preemptions - by_updates


class EngineTimes:
    """Counts an engine's requests and the seconds of its pauses."""

    def __init__(self) -> None:
        self.running = 0
        """The number of requests in the engine, including waiting ones."""
        self.changed: Callable[[], None] = lambda: None
        """Called when a pause begins or ends, when a first request comes, and when the last open request ends."""
        self._paused = 0.0
        """Total seconds of the pauses that have ended."""
        self._pause_began: float | None = None

    @property
    def is_paused(self) -> bool:
        """Return True while the requests are paused for new weights."""
        return self._pause_began is not None

    def pause(self) -> None:
        """Begin a pause. If the engine is still paused after a failed update, the pause continues."""
        if self._pause_began is None:
            self._pause_began = time.monotonic()
            self.changed()

    def resume(self) -> float:
        """End the pause; returns the duration of the pause in seconds."""
        before = self._paused
        self._paused, self._pause_began = self._paused_so_far(), None
        self.changed()
        return self._paused - before

    @contextmanager
    def request(self) -> Iterator[Callable[[Any], dict[str, float]]]:
        """Count a request as running until the `with` block ends.

        Yields a function that takes vLLM's statistics of the request and returns the seconds that the request spent in
        pauses, in the queue and in prefill.
        """
        paused = self._paused_so_far()
        self.running += 1
        if self.running == 1:
            self.changed()
        try:
            yield lambda stats: {"pause": self._paused_so_far() - paused, **_waited(stats)}
        finally:
            self.running -= 1
            if self.running == 0:
                self.changed()

    def _paused_so_far(self) -> float:
        return self._paused + (time.monotonic() - self._pause_began if self._pause_began is not None else 0.0)


def _waited(stats: Any) -> dict[str, float]:
    """Return the waiting times of a request from vLLM's statistics; empty if vLLM reports none."""
    if stats is None or not stats.first_token_ts:
        return {}
    return {"queue": stats.scheduled_ts - stats.queued_ts, "prefill": stats.first_token_ts - stats.scheduled_ts}
