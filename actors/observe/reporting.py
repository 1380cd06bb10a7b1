"""Pushes one process's numbers and reports to the metrics hub, each second."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.metrics import Gauge

from service.config import Config
from service.observe.measure import measure_process
from service.observe.metrics import Boundaries, Metrics

log = logging.getLogger(__name__)

PUSH_SECONDS = 1.0

THREAD_PUSH_SECONDS = 4.0
"""Of actors that only say what their process costs; well before they would count as silent."""


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
        self._reports: list[tuple[str, dict[str, Any]]] = []
        self._task: asyncio.Task[None] | None = None
        self._stopped = threading.Event()
        self._beside_ray = RayGauges(config.run.name) if ray.is_initialized() else None

    def start(self) -> None:
        """Begin to push, in the running event loop."""
        self._task = asyncio.ensure_future(self._push_forever())

    def start_thread(self) -> None:
        """Begin to push, in a thread; for an actor whose methods block its process."""
        threading.Thread(target=self._push_in_thread, name="metrics", daemon=True).start()

    def tell(self, part: str, report: Mapping[str, Any]) -> None:
        """A report for the status document, which goes with the next push."""
        self._reports.append((part, dict(report)))

    def push(self) -> None:
        """Push now; the hub's answer is not waited for, so a hub that is gone holds nobody up."""
        began = time.thread_time()
        if self._refresh is not None:
            self._refresh(self.metrics)
        measure_process(self.metrics)
        if self._beside_ray is not None:
            self._beside_ray.show(self.metrics)
        reports, self._reports = self._reports, []
        self._hub.push.remote(self._source, self.metrics.snapshot(), reports)
        self.metrics.count("baton_metrics_seconds_total", time.thread_time() - began)

    def stop(self) -> None:
        """Push a last time and end."""
        self._stopped.set()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.push()

    async def _push_forever(self) -> None:
        try:
            while True:
                self.push()
                await asyncio.sleep(PUSH_SECONDS)
        except Exception:
            # Nobody awaits this task: what ended it would show nowhere.
            log.exception("%s tells the metrics hub nothing any more", self._source)
            raise

    def _push_in_thread(self) -> None:
        self.push()
        while not self._stopped.wait(THREAD_PUSH_SECONDS):
            self.push()


class RayGauges:
    """The few gauges that belong beside Ray's own, `ray_<name>` at every node's metrics endpoint."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Gauge] = {}

    def show(self, metrics: Metrics) -> None:
        """Set them as they are now."""
        for metric, labels, value in metrics.in_ray():
            if metric.name not in self._gauges:
                self._gauges[metric.name] = Gauge(metric.name, metric.help, tag_keys=("run", *metric.labels))
            self._gauges[metric.name].set(value, tags={"run": self._run, **labels})
