"""The one table of Prometheus metrics; exporter, documentation, alert rules and dashboards are held against it.

Units are base units (tokens, seconds, bytes); every label has a bounded set of values, and none holds text of a prompt.
Every series also carries `role` and `ident` of the actor that measured it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["gauge", "counter", "histogram"]


class Metric(NamedTuple):
    """One row of the table."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: str = ""
    """Name of the boundaries of a histogram, see `service.observe.metrics.boundaries`."""
    key: str = ""
    """The same quantity in `metrics.jsonl`, where there is one."""
    in_ray: bool = False
    """Also shown among Ray's own metrics, as `ray_<name>`; gauges only."""


LENGTH, STEP_LENGTH, TURNS, STALENESS, SECONDS = "length", "length", "turns", "staleness", "seconds"

TABLE: tuple[Metric, ...] = (
    # Sequence lengths and padding
    Metric(
        "baton_batch_padded_sequence_length_tokens",
        "histogram",
        "Padded length that a padded batch of the mini-batch has, or would have.",
        buckets=LENGTH,
        key="generate/batch_padded_seq_len",
    ),
    Metric(
        "baton_batch_padded_sequence_length_last_tokens",
        "gauge",
        "Padded length of the last mini-batch.",
        key="generate/batch_padded_seq_len",
        in_ray=True,
    ),
    Metric(
        "baton_batch_padded_sequence_length_alert_tokens",
        "gauge",
        "Padded length above which a mini-batch counts as long; a boundary of the histogram.",
    ),
    Metric(
        "baton_batch_longest_row_tokens",
        "gauge",
        "Longest row of the last mini-batch.",
        key="generate/batch_longest_row",
    ),
    Metric(
        "baton_batch_padding_ratio",
        "gauge",
        "Share of the positions of the last padded batch that hold no token.",
        key="generate/batch_padding_ratio",
    ),
    Metric("baton_batch_tokens_total", "counter", "Positions of padded batches, padding included."),
    Metric("baton_batch_padding_tokens_total", "counter", "Positions of padded batches that hold no token."),
    Metric("baton_row_length_tokens", "histogram", "Length of a training row.", buckets=LENGTH),
    Metric("baton_step_prompt_length_tokens", "histogram", "Length of a step's prompt.", buckets=LENGTH),
    Metric("baton_step_response_length_tokens", "histogram", "Length of a step's response.", buckets=LENGTH),
    Metric(
        "baton_rows_before_merge_total",
        "counter",
        "Steps of trained mini-batches: rows if nothing merged.",
        key="generate/num_seq_before_merge",
    ),
    Metric(
        "baton_rows_after_merge_total", "counter", "Rows of trained mini-batches.", key="generate/num_seq_after_merge"
    ),
    Metric(
        "baton_prefix_mismatch_total",
        "counter",
        "Steps that did not extend the step before them.",
        key="generate/prefix_mismatches",
    ),
    Metric("baton_trajectory_turns", "histogram", "Turns of a completed trajectory.", buckets=TURNS),
    # Buffer
    Metric(
        "baton_staleness_versions",
        "histogram",
        "Versions between sampling and training, per loss token.",
        buckets=STALENESS,
        key="async/staleness_mean",
    ),
    Metric(
        "baton_staleness_mean_versions",
        "gauge",
        "Mean staleness of the loss tokens of the last mini-batch.",
        key="async/staleness_mean",
        in_ray=True,
    ),
    Metric("baton_staleness_budget_versions", "gauge", "Staleness after which a token carries no loss."),
    Metric(
        "baton_batch_sampled_tokens_total",
        "counter",
        "Tokens of trained mini-batches that a policy sampled.",
        key="tokens/sampled",
    ),
    Metric(
        "baton_batch_stale_tokens_total",
        "counter",
        "Tokens of trained mini-batches that were too old to carry loss.",
        key="tokens/stale",
    ),
    Metric("baton_buffer_groups", "gauge", "Groups that are open or done, by state.", labels=("state",), in_ray=True),
    Metric("baton_buffer_reserved_bytes", "gauge", "Bytes that admitted groups may need at worst."),
    Metric("baton_buffer_limit_bytes", "gauge", "Bytes that admission may reserve."),
    Metric("baton_tokens", "gauge", "Ledger of accepted tokens: every token has exactly one fate.", labels=("fate",)),
    Metric("baton_refused_messages_total", "counter", "Step groups that were refused at the door.", labels=("reason",)),
    Metric("baton_accepted_tokens_total", "counter", "Tokens that the buffer accepted, each counted once."),
    Metric(
        "baton_restarted_trajectories_total",
        "counter",
        "Trajectories that began anew as their next attempt.",
        labels=("reason",),
    ),
    Metric(
        "baton_given_up_trajectories_total",
        "counter",
        "Trajectories that their group went on without, because their last attempt failed or came too late.",
        labels=("reason",),
    ),
    Metric(
        "baton_completed_trajectories_total",
        "counter",
        "Completed trajectories, by how they ended.",
        labels=("stop_reason",),
    ),
    Metric(
        "baton_length_distance",
        "gauge",
        "How far the lengths of what is trained are from the lengths of what was generated, 0 to 1.",
        labels=("of",),
    ),
    Metric("baton_journal_bytes", "gauge", "Size of the journal on disk."),
    Metric("baton_journal_limit_bytes", "gauge", "Size that the journal may reach."),
    # Trainer
    Metric(
        "baton_policy_version",
        "gauge",
        "Optimizer steps of the newest policy.",
        key="trainer/global_step",
        in_ray=True,
    ),
    Metric("baton_optimizer_steps_total", "counter", "Optimizer steps since the run started."),
    Metric("baton_aborted_steps_total", "counter", "Optimizer steps that were not applied."),
    Metric("baton_last_optimizer_step_timestamp_seconds", "gauge", "Unix time of the last optimizer step."),
    Metric("baton_stall_deadline_seconds", "gauge", "Seconds without an optimizer step that end the run."),
    Metric(
        "baton_step_seconds",
        "histogram",
        "Seconds from one optimizer step to the next.",
        buckets=SECONDS,
        key="timing/step",
    ),
    Metric(
        "baton_trainer_wait_seconds",
        "histogram",
        "Seconds that the trainer waited for a mini-batch.",
        buckets=SECONDS,
        key="timing/wait_for_generation_buffer",
    ),
    Metric(
        "baton_reward", "gauge", "Mean reward of the last mini-batch, before any filter.", key="reward/avg_raw_reward"
    ),
    Metric("baton_policy_loss", "gauge", "Loss of the last optimizer step.", key="policy/policy_loss"),
    Metric("baton_policy_entropy", "gauge", "Entropy of the policy in the last step.", key="policy/policy_entropy"),
    Metric(
        "baton_policy_kl",
        "gauge",
        "Approximate divergence of trainer and sampling policy in the last step.",
        key="policy/policy_kl",
    ),
    Metric(
        "baton_fresh_token_kl",
        "gauge",
        "The same over tokens that the current policy sampled: what engine and trainer disagree about.",
        key="policy/by_staleness/0/kl",
    ),
    Metric(
        "baton_importance_ratio_mean",
        "gauge",
        "Mean ratio of trainer to sampling probabilities; near 1.",
        key="policy/is_ratio_mean",
    ),
    Metric(
        "baton_clip_ratio",
        "gauge",
        "Share of loss tokens that were clipped in the last step.",
        key="policy/loss_metrics/clip_ratio",
    ),
    Metric("baton_grad_norm", "gauge", "Norm of the gradient in the last step.", key="policy/grad_norm"),
    Metric("baton_learning_rate", "gauge", "Learning rate of the last step.", key="policy/policy_lr"),
    # Generators and weights
    Metric(
        "baton_generator_wait_seconds",
        "histogram",
        "Seconds that a generator waited for work.",
        buckets=SECONDS,
        labels=("reason",),
    ),
    Metric("baton_generated_tokens_total", "counter", "Tokens that the engines sampled."),
    Metric("baton_generator_running_requests", "gauge", "Turns that an engine is generating."),
    Metric("baton_generator_waiting_requests", "gauge", "Turns that wait inside an engine for a place in its batch."),
    Metric("baton_generator_kv_cache_ratio", "gauge", "Share of an engine's KV cache in use."),
    Metric("baton_generator_preemptions_total", "counter", "Turns that a full KV cache pushed out of the batch."),
    Metric("baton_generator_group_limit", "gauge", "Groups that may be open; fewer while the KV cache overflows."),
    Metric("baton_prefix_cached_tokens_total", "counter", "Prompt tokens that an engine found in its KV cache."),
    Metric("baton_generator_policy_version", "gauge", "Optimizer steps of the policy that an engine serves."),
    Metric("baton_generators_expected", "gauge", "Generators that the run was told to have."),
    Metric(
        "baton_environment_errors_total",
        "counter",
        "Trajectories that ended because their environment failed.",
        labels=("env",),
    ),
    Metric(
        "baton_weight_sync_seconds",
        "histogram",
        "Seconds from sending weights to serving them.",
        buckets=SECONDS,
        key="timing/sync_weights",
    ),
    Metric(
        "baton_weight_sync_pause_seconds",
        "histogram",
        "Seconds that an engine stood still for new weights.",
        buckets=SECONDS,
    ),
    Metric(
        "baton_weight_sync_bytes_total",
        "counter",
        "Bytes of weights that an engine loaded; over the seconds of its pauses, bytes a second.",
    ),
    Metric("baton_weight_sync_failures_total", "counter", "Updates of an engine that failed."),
    # The service itself
    Metric("baton_run_info", "gauge", "Always 1; names the run.", labels=("run", "baton_version")),
    Metric("baton_run_state", "gauge", "1 for the state that the run is in.", labels=("state",)),
    Metric("baton_actor_up", "gauge", "1 while the actor pushes its numbers, 0 when it went silent."),
    Metric("baton_actor_age_seconds", "gauge", "Seconds since the actor pushed its numbers."),
    Metric("baton_process_cpu_seconds_total", "counter", "CPU seconds of the actor's process."),
    Metric("baton_process_resident_memory_bytes", "gauge", "Resident memory of the actor's process."),
    Metric("baton_metrics_seconds_total", "counter", "CPU seconds that measuring itself took."),
)

BY_NAME = {metric.name: metric for metric in TABLE}
