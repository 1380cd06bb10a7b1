"""The thresholds of alerts that depend on the settings, and the longest row, from which buckets of histograms follow.

The thresholds are exported as gauges, so that deploy/prometheus/rules.yaml, which contains all other thresholds, needs
no edits.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.config import Config


@dataclass(frozen=True)
class AlertThresholds:
    """Thresholds from the configuration; equal in all actors of a run."""

    longest_row: int
    """Length of the longest row that the limits allow, in tokens."""
    long_batch: int
    """Padded length above which a mini-batch counts as long: as configured, or 12/16 of the longest row."""
    max_turns: int
    max_staleness: int
    stall_deadline: float
    generators: int
    """Number of generators at the start; the only threshold that changes during a run."""

    @classmethod
    def of(cls, config: Config) -> AlertThresholds:
        """The thresholds from a run's configuration."""
        longest = config.generator.longest_row
        return cls(
            longest,
            config.metrics.long_batch_tokens or longest * 12 // 16,
            config.most_steps,
            config.buffer.max_staleness,
            config.run.stall_deadline,
            config.generator.min_engines,
        )

    def gauges(self) -> dict[str, float]:
        """The thresholds at the start of a run, by the names of their gauges in the metrics table."""
        return {
            "baton_batch_padded_sequence_length_alert_tokens": self.long_batch,
            "baton_staleness_budget_versions": self.max_staleness,
            "baton_stall_deadline_seconds": self.stall_deadline,
            "baton_generators_expected": self.generators,
        }
