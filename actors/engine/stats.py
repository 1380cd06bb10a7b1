"""Keeps the load that vLLM reports about itself, instead of printing it. Importing this module imports vLLM."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from actors.engine.engine_load import EngineLoad, Overflows


class LoadRecorder(PrometheusStatLogger):  # type: ignore[misc]
    """Keeps the newest load that vLLM has reported.

    It is a subclass of vLLM's Prometheus logger. Beside any other logger, vLLM would add its Prometheus logger, which
    updates about fifteen histograms per request. Baton exports these figures itself.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        self._overflows = Overflows()
        self.load = EngineLoad(0, 0, 0.0, 0)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Store the figures of one scheduler step; vLLM calls this after every step."""
        if iteration_stats is not None:
            self._overflows.reported(iteration_stats.num_preempted_reqs)
        if scheduler_stats is not None:
            self.load = EngineLoad(
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs,
                scheduler_stats.kv_cache_usage,
                self._overflows.preemptions,
            )

    def preempted_by_update(self) -> None:
        """Record that a weight update has preempted every running request. Call this after `record` was called for
        every scheduler step before the update."""
        self._overflows.updated(self.load.running, self.load.waiting)

    def log_engine_initialized(self) -> None:
        """Print nothing."""

    def record_admission_rejection(self, reason: str) -> None:
        """Do nothing: Baton's engines run without admission control."""
