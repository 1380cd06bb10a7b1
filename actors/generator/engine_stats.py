"""vLLM's own figures about its load, kept instead of printed; imported with vLLM."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from actors.generator.load import EngineLoad


class LoadRecorder(PrometheusStatLogger):  # type: ignore[misc]
    """Keeps the last figures.

    It is a Prometheus logger only because vLLM adds one of its own beside any other logger, and observes some
    fifteen histograms a request with it; Baton reports these figures itself.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        self._preemptions = 0
        self.load = EngineLoad(0, 0, 0.0, 0)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM after every step."""
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self.load = EngineLoad(
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs,
                scheduler_stats.kv_cache_usage,
                self._preemptions,
            )

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Engines never sleep here."""

    def record_admission_rejection(self, reason: str) -> None:
        """Engines refuse nothing here."""
