"""Pushes one process's numbers to the metrics hub, each second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from service.config import Config
from service.measure import measure_process
from service.metrics import Boundaries, Metrics

PUSH_SECONDS = 1.0


class Reporter:
    """Holds the process's recorder and pushes it, until it is stopped.

    `refresh` is called before every push, to set what is read rather than counted.
    """

    def __init__(
        self, role: str, ident: str, config: Config, hub: Any, refresh: Callable[[Metrics], None] | None = None
    ) -> None:
        self.metrics = Metrics(role, ident, Boundaries.of(config))
        self._source = f"{role}/{ident}"
        self._hub = hub
        self._refresh = refresh
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to push, in the running event loop."""
        self._task = asyncio.ensure_future(self._push_forever())

    def push(self) -> None:
        """Push now; the hub's answer is not waited for, so a hub that is gone holds nobody up."""
        if self._refresh is not None:
            self._refresh(self.metrics)
        measure_process(self.metrics)
        self._hub.push.remote(self._source, self.metrics.snapshot())

    def stop(self) -> None:
        """Push a last time and end."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.push()

    async def _push_forever(self) -> None:
        while True:
            self.push()
            await asyncio.sleep(PUSH_SECONDS)
