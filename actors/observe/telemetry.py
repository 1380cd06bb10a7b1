"""The metrics and status reports of the driver and of the buffer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from actors.observe.reporting import Reporter
from service.cli.version import installed_version
from service.config import Config
from service.handoff.buffer import Buffer
from service.observe.measure import LeasedBatches, measure_buffer, measure_run, measure_state, measure_step
from service.observe.metrics import Metrics
from service.observe.status import buffer_report, run_report
from service.types import PolicyVersion


class RunTelemetry:
    """Reports the run's state and its steps, for the driver."""

    def __init__(self, config: Config, hub: Any, folder: str) -> None:
        self._reporter = Reporter("driver", "driver", config, hub)
        self._run = run_report(config, folder, time.time())
        measure_run(self._reporter.metrics, config, self._run["name"], installed_version())

    def start(self) -> None:
        """Start to push, in the running event loop."""
        self._reporter.start()

    def state(self, state: str) -> None:
        """The run entered a state: starting, warm_start, training, stopping, finished or stopped."""
        measure_state(self._reporter.metrics, state)
        self._report_run(state=state)
        self._reporter.push()

    def stepped(self, policy: PolicyVersion, line: Mapping[str, float]) -> None:
        """An optimizer step was applied; `line` is its line of `metrics.jsonl`."""
        now = time.time()
        measure_step(self._reporter.metrics, line, now)
        self._report_run(policy_version={"incarnation": policy.incarnation, "step": policy.step}, stepped=now)
        self._reporter.report("step", line)

    def aborted(self) -> None:
        """An optimizer step was not applied."""
        self._reporter.metrics.count("baton_aborted_steps_total")

    def sync_failed(self) -> None:
        """An engine did not load new weights."""
        self._reporter.metrics.count("baton_weight_sync_failures_total")

    def stop(self, state: str) -> None:
        """Push for the last time."""
        self.state(state)
        self._reporter.stop()

    def _report_run(self, **changes: Any) -> None:
        self._run.update(changes)
        self._reporter.report("run", self._run)


class BufferTelemetry:
    """Reports the buffer's ledger and the mini-batches that it leases."""

    def __init__(self, config: Config, hub: Any, buffer: Buffer) -> None:
        self._config = config
        self._buffer = buffer
        self._reporter = Reporter("buffer", "buffer", config, hub, self._refresh)
        self.batches = LeasedBatches(self._reporter.metrics)

    def start(self) -> None:
        """Start to push, in the running event loop."""
        self._reporter.start()

    def stop(self) -> None:
        """Push for the last time."""
        self._reporter.stop()

    def _refresh(self, metrics: Metrics) -> None:
        status = self._buffer.status()
        measure_buffer(metrics, status, self._config)
        self._reporter.report("buffer", buffer_report(status, time.time()))
