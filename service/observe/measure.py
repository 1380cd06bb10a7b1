"""From what the actors know to the table's metrics: one function for each thing that happens."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import psutil

from service.config import Config
from service.observe.metrics import Metrics, long_batch_tokens
from service.observe.metrics_table import TABLE
from service.types import Int32s, Int64s, MiniBatch, RefusalReason, Step, TrajectoryEnd

if TYPE_CHECKING:
    from service.handoff.status import BufferStatus

STEP_ROWS = tuple(metric for metric in TABLE if metric.key and metric.kind in ("gauge", "histogram"))
"""What a line of `metrics.jsonl` holds; staleness is measured per token, see `LeasedBatches`."""

PER_TOKEN = "baton_staleness_versions"

COUNTED_KEYS = {metric.name: metric.key for metric in TABLE if metric.key and metric.kind == "counter"}


def measure_run(metrics: Metrics, config: Config, version: str) -> None:
    """What stays the same during a run, for alerts to compare with."""
    metrics.set("baton_run_info", 1, run=config.run.name, baton_version=version)
    metrics.set("baton_batch_padded_sequence_length_alert_tokens", long_batch_tokens(config))
    metrics.set("baton_staleness_budget_versions", config.buffer.max_staleness)
    metrics.set("baton_stall_deadline_seconds", config.run.stall_deadline)
    metrics.set("baton_generators_expected", config.generator.engines)
    metrics.count("baton_aborted_steps_total", 0)
    metrics.count("baton_weight_sync_failures_total", 0)


def measure_state(metrics: Metrics, state: str) -> None:
    """The run entered a state."""
    metrics.forget("baton_run_state")
    metrics.set("baton_run_state", 1, state=state)


def measure_step(metrics: Metrics, line: Mapping[str, float], wall: float) -> None:
    """An optimizer step was applied; `line` is its line of `metrics.jsonl`, `wall` the Unix time."""
    for metric in STEP_ROWS:
        value = line.get(metric.key)
        if value is None or metric.name == PER_TOKEN:
            continue
        if metric.kind == "gauge":
            metrics.set(metric.name, value)
        else:
            metrics.observe(metric.name, value)
    for name, key in COUNTED_KEYS.items():
        metrics.count(name, line.get(key, 0.0))
    positions = line.get("generate/batch_padded_seq_len", 0) * line.get("generate/batch_num_seq", 0)
    metrics.count("baton_batch_tokens_total", positions)
    metrics.count("baton_batch_padding_tokens_total", positions - line.get("generate/batch_num_tokens", positions))
    metrics.count("baton_optimizer_steps_total")
    metrics.set("baton_last_optimizer_step_timestamp_seconds", wall)


def measure_played(metrics: Metrics, steps: Sequence[Step]) -> None:
    """A generator finished turns; many at once cost hardly more than one."""
    known_K = [step.extends.length if step.extends is not None else 0 for step in steps]
    metrics.observe("baton_step_prompt_length_tokens", np.add(known_K, [len(step.prompt_ids) for step in steps]))
    metrics.observe("baton_step_response_length_tokens", [len(step.response_ids) for step in steps])
    metrics.count("baton_generated_tokens_total", sum(int(np.count_nonzero(step.loss_mask)) for step in steps))


def measure_ended(metrics: Metrics, end: TrajectoryEnd) -> None:
    """A generator finished a trajectory."""
    metrics.observe("baton_trajectory_turns", end.n_steps)
    metrics.count("baton_completed_trajectories_total", stop_reason=end.stop_reason)


def measure_buffer(metrics: Metrics, status: BufferStatus, config: Config) -> None:
    """The buffer's ledger, at one revision of it."""
    for name, label, counts in (
        ("baton_buffer_groups", "state", status.groups),
        ("baton_tokens", "fate", status.tokens),
    ):
        metrics.forget(name)
        for key, count in counts.items():
            metrics.set(name, count, **{label: key})
    # From zero on, also for what has not happened yet: Prometheus sees no increase in a counter that begins at one.
    for reason in RefusalReason:
        metrics.count_to("baton_refused_messages_total", 0, reason=reason)
    for refused, count in status.refused.items():
        metrics.count_to("baton_refused_messages_total", count, reason=refused)
    for restarted, count in status.restarts.items():
        metrics.count_to("baton_restarted_trajectories_total", count, reason=restarted)
    for given_up, count in status.given_up.items():
        metrics.count_to("baton_given_up_trajectories_total", count, reason=given_up)
    metrics.count_to("baton_accepted_tokens_total", status.accepted_tokens)
    metrics.set("baton_length_distance", status.length_distance, of="trajectories")
    metrics.set("baton_length_distance", status.token_length_distance, of="tokens")
    metrics.set("baton_buffer_reserved_bytes", status.reserved_bytes)
    metrics.set("baton_buffer_limit_bytes", config.buffer.max_bytes)
    metrics.set("baton_journal_bytes", status.journal_position - status.journal_start)
    metrics.set("baton_journal_limit_bytes", config.buffer.max_journal_bytes)


def measure_process(metrics: Metrics) -> None:
    """What the actor's process costs."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    metrics.count_to("baton_process_cpu_seconds_total", usage.ru_utime + usage.ru_stime)
    metrics.set("baton_process_resident_memory_bytes", psutil.Process().memory_info().rss)


class LeasedBatches:
    """Row lengths and token ages of leased mini-batches, measured once, when their optimizer step is committed."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._open: dict[int, tuple[Int64s, Int32s, Int64s]] = {}

    def leased(self, batch: MiniBatch) -> None:
        """A mini-batch was given to the trainer."""
        micro = [micro for rank in batch.ranks for micro in rank]
        real_R = np.concatenate([np.diff(m.offsets_R)[m.trajectory_of_row_R >= 0] for m in micro])
        ages_N = np.concatenate([m.staleness_N[m.loss_mask_N] for m in micro])
        ages, counts = np.unique(ages_N, return_counts=True)
        self._open[batch.lease] = (real_R, ages, counts)

    def committed(self, lease: int) -> None:
        """Its optimizer step was applied."""
        if lease not in self._open:
            return
        length_R, ages, counts = self._open.pop(lease)
        self._metrics.observe("baton_row_length_tokens", length_R)
        self._metrics.observe(PER_TOKEN, ages, weights=counts)

    def released(self, lease: int) -> None:
        """It was given back; its rows will be leased again."""
        self._open.pop(lease, None)
