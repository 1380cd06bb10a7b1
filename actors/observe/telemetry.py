"""What the driver and the buffer tell the metrics hub."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from actors.observe.reporting import Reporter
from service.config import Config
from service.handoff.buffer import Buffer
from service.observe.measure import LeasedBatches, measure_buffer, measure_run, measure_state, measure_step
from service.observe.metrics import Metrics
from service.observe.status import buffer_status
from service.observe.version import installed_version
from service.types import PolicyVersion


class RunTelemetry:
    """The run's state and its steps, as the driver knows them."""

    def __init__(self, config: Config, hub: Any, folder: str) -> None:
        self._reporter = Reporter("driver", "driver", config, hub)
        self._run: dict[str, Any] = {
            "name": config.run.name,
            "folder": folder,
            "started": time.time(),
            "max_steps": config.run.max_steps,
            "generators": config.generator.engines,
            "mini_batch_size": config.trainer.mini_batch_size,
            "lookahead": config.buffer.lookahead,
            "max_staleness": config.buffer.max_staleness,
        }
        measure_run(self._reporter.metrics, config, installed_version())

    def start(self) -> None:
        """Begin to push, in the running event loop."""
        self._reporter.start()

    def state(self, state: str) -> None:
        """The run entered a state: starting, warm_start, training, stopping, finished."""
        measure_state(self._reporter.metrics, state)
        self._put(state=state)
        self._reporter.push()

    def stepped(self, policy: PolicyVersion, line: Mapping[str, float]) -> None:
        """An optimizer step was applied; `line` is its line of `metrics.jsonl`."""
        now = time.time()
        measure_step(self._reporter.metrics, line, now)
        self._put(policy_version={"incarnation": policy.incarnation, "step": policy.step}, stepped=now)
        self._reporter.tell("step", line)

    def aborted(self) -> None:
        """An optimizer step was not applied."""
        self._reporter.metrics.count("baton_aborted_steps_total")

    def sync_failed(self) -> None:
        """An engine did not take new weights."""
        self._reporter.metrics.count("baton_weight_sync_failures_total")

    def stop(self, state: str) -> None:
        """Push a last time."""
        self.state(state)
        self._reporter.stop()

    def _put(self, **changes: Any) -> None:
        self._run.update(changes)
        self._reporter.tell("run", self._run)


class BufferTelemetry:
    """The buffer's ledger, and the batches that it leases."""

    def __init__(self, config: Config, hub: Any, buffer: Buffer) -> None:
        self._config = config
        self._buffer = buffer
        self._reporter = Reporter("buffer", "buffer", config, hub, self._refresh)
        self.batches = LeasedBatches(self._reporter.metrics)

    def start(self) -> None:
        """Begin to push, in the running event loop."""
        self._reporter.start()

    def _refresh(self, metrics: Metrics) -> None:
        status = self._buffer.status()
        measure_buffer(metrics, status, self._config)
        self._reporter.tell("buffer", buffer_status(status))
