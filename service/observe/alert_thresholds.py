"""The thresholds that the alert rules compare with; each is a gauge, so no rule is edited when a setting changes."""

from __future__ import annotations

from service.config import Config


def long_batch_tokens(config: Config) -> int:
    """The padded length above which a mini-batch counts as long: as configured, or 12/16 of the longest row."""
    longest = config.generator.max_input_length + config.generator.max_generate_length
    return config.metrics.long_batch_tokens or longest * 12 // 16


def alert_thresholds(config: Config) -> dict[str, float]:
    """The gauges of the table by name, as a run begins; only the number of generators changes."""
    return {
        "baton_batch_padded_sequence_length_alert_tokens": long_batch_tokens(config),
        "baton_staleness_budget_versions": config.buffer.max_staleness,
        "baton_stall_deadline_seconds": config.run.stall_deadline,
        "baton_generators_expected": config.generator.min_engines,
    }
