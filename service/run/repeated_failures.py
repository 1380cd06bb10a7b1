"""Names why trajectories fail, and detects an environment that always fails, as opposed to one that fails sometimes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from service.errors import RunFailed
from service.handoff.steps.stop_reason import FAILURES


class FailureWatch:
    """Counts how trajectories ended since the last optimizer step, from the statuses of the generators."""

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        """`limit`: see `check`; `say`: writes a line to the terminal."""
        self._limit = limit
        self._say = say
        self._said: set[str] = set()
        """Stop reasons of failures that were named."""
        self._before: Counter[str] = Counter()
        self._now: Counter[str] = Counter()

    def progressed(self) -> None:
        """Restart the count, because an optimizer step was applied."""
        self._before = self._now

    def name_new(self, statuses: Sequence[Mapping[str, Any]]) -> None:
        """Write one line to the terminal for the first failure with each stop reason."""
        for reason, why in [kind for status in statuses for kind in status["failures"].items()]:
            if reason not in self._said:
                self._said.add(reason)
                self._say(f"a trajectory failed and starts again, the first one for this reason: {why}")

    def check(self, statuses: Sequence[Mapping[str, Any]]) -> None:
        """Name new failures, and raise if every trajectory fails.

        Raises:
            RunFailed: `limit` trajectories or more ended since the last step, and every one of them failed.
        """
        self.name_new(statuses)
        self._now = Counter()
        for status in statuses:
            self._now.update({name: n for name, n in status["counts"].items() if name.startswith("end_")})
        # The counts of a restarted generator begin at 0; a negative difference counts as 0.
        ended = self._now - self._before
        if ended.total() < self._limit or any(name.removeprefix("end_") not in FAILURES for name in ended):
            return
        reasons = ", ".join(f"{n} {name.removeprefix('end_')}" for name, n in ended.most_common())
        details = {why for status in statuses for why in status["failures"].values()}
        raise RunFailed(f"every trajectory since the last step failed ({reasons}): {'; '.join(sorted(details))}")
