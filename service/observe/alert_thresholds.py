"""What alerts and the buckets of histograms compare with: gauges, so no alert rule is edited when a setting changes."""

from __future__ import annotations

from dataclasses import dataclass

from service.config import Config


@dataclass(frozen=True)
class AlertThresholds:
    """What of the configuration metrics compare with; equal in all actors of a run."""

    longest_row: int
    """Tokens of the longest row that the limits allow."""
    long_batch: int
    """Padded length above which a mini-batch counts as long: as configured, or 12/16 of the longest row."""
    max_turns: int
    max_staleness: int
    stall_deadline: float
    generators: int
    """Generators at the start; the only one of these that changes in a run."""

    @classmethod
    def of(cls, config: Config) -> AlertThresholds:
        """The thresholds of a run."""
        longest = config.generator.max_input_length + config.generator.max_generate_length
        return cls(
            longest,
            config.metrics.long_batch_tokens or longest * 12 // 16,
            config.most_steps,
            config.buffer.max_staleness,
            config.run.stall_deadline,
            config.generator.min_engines,
        )

    def gauges(self) -> dict[str, float]:
        """The gauges of the table by name, as a run begins."""
        return {
            "baton_batch_padded_sequence_length_alert_tokens": self.long_batch,
            "baton_staleness_budget_versions": self.max_staleness,
            "baton_stall_deadline_seconds": self.stall_deadline,
            "baton_generators_expected": self.generators,
        }
