"""Records the states of a generator over time, and the seconds for which it had no group to play."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from actors.engine.engine_load import EngineTimes
from service.observe.recorder import States, Trace

STARTING, WAITING, PAUSED, GENERATING = "starting", "waiting", "paused", "generating"
EVALUATING = "evaluating"
ENVIRONMENT = "environment"
"""State in which groups are open but the engine has no request, because environments or agents are at work."""


class Activity:
    """Tracks the states of a generator and of its engine: records spans in the timeline, and counts seconds by
    state."""

    def __init__(self, trace: Trace, engine: EngineTimes) -> None:
        self._engine = engine
        engine.changed = self._look
        self._states = States(trace, "engine", STARTING)
        self._began: float | None = None
        self._has_work = False
        self._waited = 0.0
        """The value of `seconds` when the generator last got a group after it had none."""
        self._evaluations = 0

    def begin(self) -> None:
        """Note that the engine is up and waits for the first group."""
        self._began = time.monotonic()
        self._look()

    def idle(self) -> None:
        """Note that the last open group ended."""
        self._has_work = False
        self._look()

    def busy(self, reason: str) -> float | None:
        """Record that a group begins. Returns the seconds without a group before it, without evaluations; None if
        another group is open. `reason`: why the group did not come earlier."""
        if self._has_work:
            return None
        self._states.enter(WAITING, reason=reason)
        seconds, self._waited = self.seconds - self._waited, self.seconds
        self._has_work = True
        self._look()
        return seconds

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Record that the engine evaluates until the `with` block ends."""
        self._evaluations += 1
        self._look()
        try:
            yield
        finally:
            self._evaluations -= 1
            self._look()

    @property
    def is_evaluating(self) -> bool:
        """Return True while an evaluation is in progress."""
        return self._evaluations > 0

    def by_state(self) -> dict[str, float]:
        """Return the seconds by state so far."""
        return self._states.seconds()

    @property
    def seconds(self) -> float:
        """Return the seconds without a group so far. Evaluations do not count."""
        return self._states.seconds().get(WAITING, 0.0)

    @property
    def elapsed(self) -> float:
        """Return the seconds since `begin`."""
        return time.monotonic() - self._began if self._began is not None else 0.0

    def _look(self) -> None:
        if self._has_work:
            now = PAUSED if self._engine.is_paused else GENERATING if self._engine.running else ENVIRONMENT
        else:
            now = EVALUATING if self._evaluations else WAITING if self._began is not None else STARTING
        self._states.enter(now)
