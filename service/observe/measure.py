"""Converts events of a run to metrics of the table: one function per event."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import psutil

from service.handoff.steps.tables import by_turn
from service.observe.metrics import AlertThresholds, Metrics
from service.observe.metrics_table import TABLE
from service.observe.status_document import Uploaded
from service.types import Int32s, Int64s, MiniBatch, RefusalReason, Steps, TrajectoryEnd

if TYPE_CHECKING:
    from service.handoff.verbs import BufferStatus


def measure_run(metrics: Metrics, thresholds: AlertThresholds, name: str, version: str) -> None:
    """Record the start of a run: its name, the thresholds of its alerts, and zeros for counters of rare events."""
    metrics.set("baton_run_info", 1, run=name, baton_version=version)
    for name, value in thresholds.gauges().items():
        metrics.set(name, value)
    metrics.count("baton_aborted_steps_total", 0)
    metrics.count("baton_weight_sync_failures_total", 0)


def measure_step(metrics: Metrics, line: Mapping[str, float], wall: float) -> None:
    """Record an optimizer step; `line` is its line of `metrics.jsonl`, `wall` the Unix time."""
    for metric in TABLE:
        if not metric.key:
            continue
        if metric.kind == "counter":
            metrics.count(metric.name, line.get(metric.key, 0.0))
        elif (value := line.get(metric.key)) is not None:
            record = metrics.set if metric.kind == "gauge" else metrics.observe
            record(metric.name, value)
    positions = line.get("generate/batch_padded_seq_len", 0) * line.get("generate/batch_num_seq", 0)
    metrics.count("baton_batch_tokens_total", positions)
    metrics.count("baton_batch_padding_tokens_total", positions - line.get("generate/batch_num_tokens", positions))
    metrics.count("baton_optimizer_steps_total")
    metrics.set("baton_last_optimizer_step_timestamp_seconds", wall)


def measure_steps(metrics: Metrics, tables: Sequence[Steps]) -> None:
    """Record the turns that a generator played. Many turns in one call cost little more than one turn."""
    if not tables:
        return
    prompt_K = np.concatenate([steps.extends_length_K + steps.prompt_length_K for steps in tables])
    response_K = np.concatenate([np.diff(steps.offsets_K) - steps.prompt_length_K for steps in tables])
    metrics.observe("baton_step_prompt_length_tokens", prompt_K)
    metrics.observe("baton_step_response_length_tokens", response_K)
    for turns, n_responses, n_truncated in by_turn(tables):
        metrics.count("baton_responses_total", n_responses, turns=turns)
        metrics.count("baton_truncated_responses_total", n_truncated, turns=turns)
    metrics.count("baton_generated_tokens_total", sum(int(np.count_nonzero(steps.loss_mask_N)) for steps in tables))


def measure_store(metrics: Metrics, uploaded: Uploaded) -> None:
    """Record the state of the uploads to the object store."""
    if uploaded.step is not None:
        metrics.set("baton_store_checkpoint_step", uploaded.step)
    metrics.set("baton_store_failing", bool(uploaded.failing))
    metrics.count_to("baton_store_failures_total", uploaded.failures)
    metrics.count_to("baton_store_uploaded_bytes_total", uploaded.bytes)


def measure_states(metrics: Metrics, seconds: Mapping[str, float]) -> None:
    """Record the total seconds that an actor has spent in each of its states."""
    for state, total in seconds.items():
        metrics.count_to("baton_state_seconds_total", total, state=state)


def measure_ended(metrics: Metrics, ended: Sequence[tuple[TrajectoryEnd, str]]) -> None:
    """Record trajectories that a generator finished: (end of the trajectory, name of its environment) of each."""
    if not ended:
        return
    metrics.observe("baton_trajectory_turns", [end.n_steps for end, _ in ended])
    for reason, n in Counter(end.stop_reason for end, _ in ended).items():
        metrics.count("baton_completed_trajectories_total", n, stop_reason=reason)
    for env, n in Counter(env for end, env in ended if end.stop_reason.startswith("environment_")).items():
        metrics.count("baton_environment_errors_total", n, env=env)


def measure_buffer(
    metrics: Metrics, status: BufferStatus, limit_bytes: int, scorer_failures: Iterable[str] = ()
) -> None:
    """Record the state of the buffer at one revision of its ledger; `scorer_failures`: all reasons for which a scorer
    can fail."""
    metrics.set_all("baton_buffer_groups", "state", status.groups)
    metrics.set_all("baton_tokens", "fate", status.tokens)
    # Each counter starts at 0: if it first appears as 1, Prometheus computes no increase.
    refused: dict[str, int] = {**dict.fromkeys(RefusalReason, 0), **status.refused}
    for name, counts in (
        ("baton_refused_messages_total", refused),
        ("baton_restarted_trajectories_total", status.restarts),
        ("baton_given_up_trajectories_total", status.given_up),
    ):
        for reason, count in counts.items():
            metrics.count_to(name, count, reason=reason)
    metrics.count_to("baton_accepted_tokens_total", status.accepted_tokens)
    for scorer, of in status.scorers.items():
        metrics.set("baton_scorer_waiting_groups", of.waiting, scorer=scorer)
        metrics.count_to("baton_scorer_seconds_total", of.seconds, scorer=scorer)
        for outcome, groups in (("scored", of.scored), ("fallback", of.fallbacks), ("refused", of.refused)):
            metrics.count_to("baton_scorer_groups_total", groups, scorer=scorer, outcome=outcome)
        for reason, times in {**dict.fromkeys(scorer_failures, 0), **of.failures}.items():
            metrics.count_to("baton_scorer_failures_total", times, scorer=scorer, reason=reason)
    metrics.set_all("baton_curriculum_prompts", "success", status.prompts)
    metrics.count_to("baton_curriculum_passed_over_total", status.passed_over)
    metrics.set("baton_length_distance", status.length_distance, of="trajectories")
    metrics.set("baton_length_distance", status.token_length_distance, of="tokens")
    metrics.set("baton_buffer_reserved_bytes", status.reserved_bytes)
    metrics.set("baton_buffer_limit_bytes", limit_bytes)
    metrics.set("baton_journal_bytes", status.journal_position - status.journal_start)
    metrics.set("baton_journal_limit_bytes", status.journal_limit_bytes)


def measure_process(metrics: Metrics) -> None:
    """Record CPU time and memory of the actor's process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    metrics.count_to("baton_process_cpu_seconds_total", usage.ru_utime + usage.ru_stime)
    metrics.set("baton_process_resident_memory_bytes", psutil.Process().memory_info().rss)


class LeasedBatches:
    """Records the row lengths and the token staleness of a leased mini-batch once, when its optimizer step is
    committed."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._open: dict[int, tuple[Int64s, Int32s, Int64s]] = {}

    def leased(self, batch: MiniBatch) -> None:
        """Record that a mini-batch was leased to the trainer. Padding rows have no trajectory and are not counted."""
        micro = [micro for rank in batch.ranks for micro in rank]
        length_R = np.concatenate([np.diff(m.offsets_R)[m.trajectory_of_row_R >= 0] for m in micro])
        staleness_N = np.concatenate([m.staleness_N[m.loss_mask_N] for m in micro])
        self._open[batch.lease] = (length_R, *np.unique(staleness_N, return_counts=True))

    def committed(self, lease: int) -> None:
        """Record that the optimizer step of a leased mini-batch was applied."""
        if lease in self._open:
            length_R, staleness, counts = self._open.pop(lease)
            self._metrics.observe("baton_row_length_tokens", length_R)
            self._metrics.observe("baton_staleness_versions", staleness, weights=counts)

    def released(self, lease: int) -> None:
        """Record that the lease of a mini-batch was released; its rows will be leased again."""
        self._open.pop(lease, None)
