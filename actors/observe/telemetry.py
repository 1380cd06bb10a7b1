"""The metrics and status reports of the driver and of the buffer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.observe.reporting import Reporter
from service.config import Config
from service.handoff.buffer import Buffer
from service.observe.measure import (
    LeasedBatches,
    measure_buffer,
    measure_run,
    measure_states,
    measure_step,
    measure_store,
)
from service.observe.metrics import AlertThresholds, Metrics
from service.observe.recorder import States
from service.observe.status_document import buffer_report
from service.scorers.reply import REASONS
from service.store.uploads import Uploads
from service.types import PolicyVersion
from service.version import installed_version

SLOW_SYNC_SECONDS = 0.02
"""The timeline shows only journal syncs that take at least this many seconds."""


class RunTelemetry(Reporter):
    """The driver's reporter: sends the state and the optimizer steps of the run to the metrics hub."""

    def __init__(self, config: Config, hub: Any, folder: str, uploads: Uploads | None = None) -> None:
        super().__init__("driver", "driver", config, hub, self._measure_now)
        self._uploads = uploads
        self.states = States(self.trace, "trainer", "starting")
        self._shown: dict[str, Any] = {
            "name": Path(folder).name,
            "folder": folder,
            "started": time.time(),
            "max_steps": config.run.max_steps,
            "generators": config.generator.min_engines,
            "concurrent_groups": config.generator.concurrent_groups,
            "ranks": config.trainer.ranks,
            "mini_batch_size": config.trainer.mini_batch_size,
            "lookahead": config.buffer.lookahead,
            "max_staleness": config.buffer.max_staleness,
            "long_batch": (thresholds := AlertThresholds.of(config)).long_batch,
        }
        measure_run(self.metrics, thresholds, self._shown["name"], installed_version())

    def doing(self, state: str, **detail: Any) -> None:
        """Report the state of the driver's loop: waiting, step, commit, weights, checkpoint, ..."""
        self.states.enter(state, **detail)

    def span(self, row: str, step: int, began: float) -> None:
        """Record a finished checkpoint or evaluation of a step in the timeline. `began`: the time of its start."""
        self.trace.span(row, f"step {step}", began, time.monotonic())

    def state(self, state: str) -> None:
        """Report that the run has entered this state: starting, warm_start, training, stopping, finished or stopped."""
        self.metrics.set_all("baton_run_state", "state", {state: 1})
        self._report_run(state=state)
        self.push()

    def at(self, policy: PolicyVersion, **more: Any) -> None:
        """Report the version of the policy. A resumed run reports it from its start on."""
        self._report_run(policy_version=policy._asdict(), **more)

    def stepped(
        self, policy: PolicyVersion, line: Mapping[str, float], seconds_left: float | None, not_learning: str
    ) -> None:
        """Report an applied optimizer step. `line` is the step's line of `metrics.jsonl`; for the other arguments see
        `Progress`."""
        now = time.time()
        measure_step(self.metrics, line, now)
        self.at(policy, stepped=now, seconds_left=seconds_left, not_learning=not_learning)
        if "timing/sync_weights" in line:
            self._report_run(weights_sync_seconds=line["timing/sync_weights"])
        self.report("step", line)
        staleness = {key: line[f"async/staleness_{key}"] for key in ("mean", "max") if f"async/staleness_{key}" in line}
        self.trace.counter("staleness", staleness)

    def failing(self, why: str) -> None:
        """Report why many trajectories fail, or which failures delay the next optimizer step. Empty: neither is the
        case."""
        self._report_run(failing=why)

    def generators(self, expected: int) -> None:
        """Report the number of generators that should be up: all that joined and have not left, but at least the
        configured minimum."""
        self.metrics.set("baton_generators_expected", expected)
        self._report_run(generators=expected)

    def left(self, generator: str) -> None:
        """Report that a generator has left."""
        self._hub.forget.remote(f"generator/{generator}")

    def _measure_now(self, metrics: Metrics) -> None:
        measure_states(metrics, self.states.seconds())
        if self._uploads is not None:
            measure_store(metrics, self._uploads.status)
            self._report_run(store={"url": self._uploads.url, **self._uploads.status._asdict()})

    def _report_run(self, **changes: Any) -> None:
        self._shown.update(changes)
        self.report("run", self._shown)


class BufferTelemetry(Reporter):
    """The buffer's reporter: sends the buffer's ledger and the leased mini-batches to the metrics hub."""

    def __init__(self, config: Config, hub: Any, buffer: Buffer) -> None:
        super().__init__("buffer", "buffer", config, hub, self._measure_now)
        self._limit_bytes = config.buffer.max_bytes
        self._buffer = buffer
        self.batches = LeasedBatches(self.metrics)
        self._began = time.monotonic()
        self._syncing, self._syncs, self.waited_for_scorers = 0.0, 0, 0.0

    def leased(self, lease: int, groups: Sequence[int], began: float) -> None:
        """Record a mini-batch that was formed and encoded. `began`: the time at which forming it began."""
        self.trace.span("leases", f"lease {lease}", began, time.monotonic(), lease=lease, groups=list(groups))

    def committed(self, lease: int, step: int, began: float) -> None:
        """Record that the commit of a lease is on disk; `began`: the time at which the commit began."""
        self.trace.span("commits", f"step {step}", began, time.monotonic(), lease=lease)

    def synced(self, began: float) -> None:
        """Record a sync of the journal to disk; `began`: the time at which the sync began."""
        now = time.monotonic()
        self._syncing += now - began
        self._syncs += 1
        if now - began >= SLOW_SYNC_SECONDS:
            self.trace.span("journal", "sync", began, now)

    def _measure_now(self, metrics: Metrics) -> None:
        status = self._buffer.status()
        growing = {state: status.groups.get(state, 0) for state in ("issued", "open", "complete", "leased")}
        self.trace.counter("groups", growing)
        idle = time.monotonic() - self._began - self._syncing - self.waited_for_scorers
        metrics.count_to("baton_journal_syncs_total", self._syncs)
        measure_states(metrics, {"syncing": self._syncing, "scorers": self.waited_for_scorers, "idle": idle})
        measure_buffer(metrics, status, self._limit_bytes, REASONS)
        self.report("buffer", buffer_report(status, time.time()))
