"""What an engine is doing, and the times of its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class EngineTimes:
    """Counts an engine's requests and the seconds of its pauses."""

    def __init__(self) -> None:
        self.running = 0
        """Requests in the engine, waiting ones included."""
        self.changed: Callable[[], None] = lambda: None
        """Called when a pause begins or ends, and when there is a first request or none is left."""
        self._paused = 0.0
        """Seconds of the pauses that ended."""
        self._pause_began: float | None = None

    @property
    def is_paused(self) -> bool:
        """True while the requests are paused for new weights."""
        return self._pause_began is not None

    def pause(self) -> None:
        """A pause begins; or goes on, after an update that failed."""
        if self._pause_began is None:
            self._pause_began = time.monotonic()
            self.changed()

    def resume(self) -> float:
        """The pause ends; returns its seconds."""
        before = self._paused
        self._paused, self._pause_began = self._paused_so_far(), None
        self.changed()
        return self._paused - before

    @contextmanager
    def request(self) -> Iterator[Callable[[Any], dict[str, float]]]:
        """Count a request; yields a function from vLLM's statistics to its seconds in pauses, queue and prefill."""
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
    """Of a request of which vLLM keeps statistics: it does where it reports its load."""
    if stats is None or not stats.first_token_ts:
        return {}
    return {"queue": stats.scheduled_ts - stats.queued_ts, "prefill": stats.first_token_ts - stats.scheduled_ts}
