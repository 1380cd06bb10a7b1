"""Pushes the metrics and status reports of one process to the metrics hub: every second, or every 4 seconds from a
thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.metrics import Gauge

from actors.calls import log_failure
from service.config import Config
from service.observe.measure import measure_process
from service.observe.metrics import AlertThresholds, Metrics
from service.observe.recorder import Trace

PUSH_SECONDS = 1.0

THREAD_PUSH_SECONDS = 4.0
"""Seconds between two pushes of an actor that reports only its process. (The hub counts an actor as silent after a
longer time.)"""


class Reporter:
    """Holds metrics and timeline of a process, and pushes them, with the queued status reports, to the metrics hub.

    `refresh` is called before every push; it sets the metrics that depend on the current state.
    """

    def __init__(
        self, role: str, ident: str, config: Config, hub: Any, refresh: Callable[[Metrics], None] | None = None
    ) -> None:
        self.metrics = Metrics(role, ident, AlertThresholds.of(config))
        self._source = f"{role}/{ident}"
        self.trace = Trace(self._source)
        self._hub = hub
        self._refresh = refresh
        self._reports: list[tuple[str, dict[str, Any]]] = []
        self._task: asyncio.Task[None] | None = None
        self._stopped = threading.Event()
        self._run = config.run.name
        self._ray_gauges: dict[str, Gauge] = {}
        self._is_in_ray = ray.is_initialized()
        if self._is_in_ray:
            self.metrics.set("baton_actor_host_info", 1.0, host=ray.util.get_node_ip_address())

    def start(self) -> None:
        """Start to push to the hub every `PUSH_SECONDS`, in the running event loop."""
        self._task = asyncio.ensure_future(self._push_forever())
        log_failure(self._task, f"{self._source} pushes no more metrics to the hub")

    def start_thread(self) -> None:
        """Start to push to the hub every `THREAD_PUSH_SECONDS`, in a thread: for an actor whose methods block its event
        loop."""
        threading.Thread(target=self._push_in_thread, name="metrics", daemon=True).start()

    def report(self, part: str, report: Mapping[str, Any]) -> None:
        """Queue the report `part` (`run`, `buffer` or `step`) of the status document; the next push sends it."""
        self._reports.append((part, dict(report)))

    def push(self) -> None:
        """Send the metrics, the queued reports and the new lines of the timeline to the hub now. The hub's answer is
        not awaited, so a dead hub delays nothing."""
        began = time.thread_time()
        if self._refresh is not None:
            self._refresh(self.metrics)
        measure_process(self.metrics)
        if self._is_in_ray:
            self._copy_to_ray()
        reports, self._reports = self._reports, []
        self._hub.push.remote(self._source, self.metrics.snapshot(), reports, self.trace.take())
        self.metrics.count("baton_metrics_seconds_total", time.thread_time() - began)

    def stop(self) -> None:
        """End the regular pushes, and push to the hub a last time."""
        self._stopped.set()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.push()

    async def _push_forever(self) -> None:
        while True:
            self.push()
            await asyncio.sleep(PUSH_SECONDS)

    def _push_in_thread(self) -> None:
        self.push()
        while not self._stopped.wait(THREAD_PUSH_SECONDS):
            self.push()

    def _copy_to_ray(self) -> None:
        """Set the few gauges that Ray's metrics endpoints also serve, as `ray_<name>`."""
        for metric, labels, value in self.metrics.in_ray():
            if metric.name not in self._ray_gauges:
                self._ray_gauges[metric.name] = Gauge(metric.name, metric.help, tag_keys=("run", *metric.labels))
            self._ray_gauges[metric.name].set(value, tags={"run": self._run, **labels})
