"""The table of all Prometheus metrics, with the keys of `metrics.jsonl`. Exporter, documentation, alert rules and
dashboards are checked against this table.

Units are base units (tokens, seconds, bytes). Every label has a bounded set of values, and no label holds text of a
prompt. Every series also has the labels `role` and `ident` of the actor that measured it.

`STEP_KEYS` has the keys of a line of `metrics.jsonl` that have no Prometheus metric. In step-wise training a
mean is over trajectories unless the key's description names something else. `<...>` in a key stands for a name.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

Kind = Literal["gauge", "counter", "histogram"]


class Metric(NamedTuple):
    """One row of the table: a metric, its kind, its labels and its meaning."""

    kind: Kind
    name: str
    help: str
    key: str = ""
    """The key of `metrics.jsonl` from which the metric is recorded; empty if there is no such key."""
    labels: tuple[str, ...] = ()
    buckets: str = ""
    """The name of a histogram's bounds in `service.observe.metrics.bucket_bounds`; empty for other kinds."""
    in_ray: bool = False
    """Whether Ray's metrics endpoints also serve this gauge, as `ray_<name>`."""


gauge, counter, histogram = partial(Metric, "gauge"), partial(Metric, "counter"), partial(Metric, "histogram")

LENGTH, TURNS, STALENESS, SECONDS, FRACTION = "length", "turns", "staleness", "seconds", "fraction"
PADDED = "generate/batch_padded_seq_len"

LENGTHS_AND_PADDING = (
    histogram("baton_batch_padded_sequence_length_tokens", "Padded length of a mini-batch.", PADDED, buckets=LENGTH),
    gauge("baton_batch_padded_sequence_length_last_tokens", "Padded length of the last batch.", PADDED, in_ray=True),
    gauge("baton_batch_padded_sequence_length_alert_tokens", "Padded length above which a mini-batch counts as long."),
    gauge("baton_batch_longest_row_tokens", "Longest row of a mini-batch.", "generate/batch_longest_row"),
    gauge("baton_batch_truncated_ratio", "Fraction of responses cut at the limit.", "generate/truncated_ratio"),
    gauge("baton_batch_padding_ratio", "Fraction of padded positions without token.", "generate/batch_padding_ratio"),
    histogram(
        "baton_batch_distinct_ratio", "Distinct tokens, over all.", "generate/batch_distinct_ratio", buckets=FRACTION
    ),
    counter("baton_batch_tokens_total", "Positions of padded batches, padding included."),
    counter("baton_batch_padding_tokens_total", "Positions of padded batches that hold no token."),
    histogram("baton_row_length_tokens", "Length of a training row.", buckets=LENGTH),
    histogram("baton_step_prompt_length_tokens", "Length of a step's prompt.", buckets=LENGTH),
    histogram("baton_step_response_length_tokens", "Length of a step's response.", buckets=LENGTH),
    counter("baton_rows_before_merge_total", "Rows without merging: one a step.", "generate/num_seq_before_merge"),
    counter("baton_rows_after_merge_total", "Rows of trained mini-batches.", "generate/num_seq_after_merge"),
    counter("baton_prefix_mismatch_total", "Steps that extend no step.", "generate/prefix_mismatches"),
    histogram("baton_trajectory_turns", "Turns of a completed trajectory.", buckets=TURNS),
    counter("baton_responses_total", "Responses of the policy, by turn, from 1.", labels=("turns",)),
    counter("baton_truncated_responses_total", "Responses cut at the limit.", labels=("turns",)),
)

BUFFER = (
    histogram("baton_staleness_versions", "Staleness of a loss token.", buckets=STALENESS),
    gauge(
        "baton_staleness_mean_versions", "Mean of the last batch's loss tokens.", "async/staleness_mean", in_ray=True
    ),
    gauge("baton_staleness_budget_versions", "Staleness beyond which a token carries no loss."),
    counter("baton_batch_sampled_tokens_total", "Sampled tokens of trained mini-batches.", "tokens/sampled"),
    counter("baton_batch_stale_tokens_total", "Sampled tokens too stale to carry loss.", "tokens/stale"),
    gauge("baton_buffer_groups", "Groups, by state.", labels=("state",), in_ray=True),
    gauge("baton_buffer_reserved_bytes", "Bytes that admitted groups may need at worst."),
    gauge("baton_buffer_limit_bytes", "Bytes that admission may reserve."),
    gauge("baton_tokens", "Accepted tokens; each has exactly one fate.", labels=("fate",)),
    counter("baton_refused_messages_total", "Messages that the buffer refused.", labels=("reason",)),
    counter("baton_accepted_tokens_total", "Tokens that the buffer accepted, each counted once."),
    counter("baton_restarted_trajectories_total", "Trajectories that began another attempt.", labels=("reason",)),
    counter("baton_given_up_trajectories_total", "Trajectories without a usable attempt.", labels=("reason",)),
    counter("baton_completed_trajectories_total", "Completed trajectories.", labels=("stop_reason",)),
    gauge("baton_length_distance", "Distance of trained from generated lengths, 0 to 1.", labels=("of",)),
    counter("baton_scorer_groups_total", "Groups, `scored`, `fallback` or `refused`.", labels=("scorer", "outcome")),
    counter("baton_scorer_failures_total", "Calls of a scorer without good answer.", labels=("scorer", "reason")),
    counter("baton_scorer_seconds_total", "Seconds in which a scorer's workers were busy.", labels=("scorer",)),
    gauge("baton_scorer_waiting_groups", "Groups that wait for a scorer.", labels=("scorer",)),
    gauge("baton_journal_bytes", "Size of the journal on disk."),
    gauge("baton_journal_limit_bytes", "Size of the journal beyond which no group is admitted."),
    counter("baton_journal_syncs_total", "Times that the journal was written to the disk."),
)

TRAINER = (
    gauge("baton_policy_version", "Optimizer steps of the newest policy.", "trainer/global_step", in_ray=True),
    counter("baton_optimizer_steps_total", "Optimizer steps since the run started."),
    counter("baton_aborted_steps_total", "Optimizer steps that were not applied."),
    gauge("baton_last_optimizer_step_timestamp_seconds", "Unix time of the last optimizer step."),
    gauge("baton_stall_deadline_seconds", "Seconds without an optimizer step after which the run ends."),
    histogram("baton_step_seconds", "Seconds between two optimizer steps.", "timing/step", buckets=SECONDS),
    histogram(
        "baton_trainer_wait_seconds", "Wait for a mini-batch.", "timing/wait_for_generation_buffer", buckets=SECONDS
    ),
    gauge("baton_reward", "Mean reward of the last mini-batch, before any filter.", "reward/avg_raw_reward"),
    gauge("baton_groups_without_variance", "Fraction of groups with equal returns.", "reward/groups_without_variance"),
    gauge("baton_curriculum_prompts", "Prompts by success: untried, below, inside, above.", labels=("success",)),
    counter("baton_curriculum_passed_over_total", "Prompts that the curriculum passed over."),
    gauge(
        "baton_evaluation_lag_intervals", "Steps since the newest evaluated one, in intervals.", "eval/lag_intervals"
    ),
    gauge("baton_groups_all_zero", "Fraction of groups with all returns 0.", "reward/groups_all_zero"),
    gauge("baton_groups_all_one", "Fraction of groups with all returns 1.", "reward/groups_all_one"),
    gauge("baton_policy_loss", "Loss.", "policy/policy_loss"),
    gauge("baton_policy_entropy", "Entropy of the policy.", "policy/policy_entropy"),
    gauge("baton_policy_kl", "Approximate KL of trainer and sampling policy.", "policy/policy_kl"),
    gauge("baton_fresh_token_kl", "The same for the newest policy's tokens: noise.", "policy/by_staleness/0/kl"),
    gauge("baton_importance_ratio_mean", "Mean importance ratio; near 1.", "policy/is_ratio_mean"),
    gauge("baton_clip_ratio", "Fraction of loss tokens that were clipped.", "policy/loss_metrics/clip_ratio"),
    gauge("baton_grad_norm", "Norm of the gradient.", "policy/grad_norm"),
    gauge("baton_learning_rate", "Learning rate.", "policy/policy_lr"),
    gauge("baton_store_checkpoint_step", "Step of the newest checkpoint in the object store."),
    gauge("baton_store_failing", "1 while the newest upload failed, else 0."),
    counter("baton_store_failures_total", "Uploads that failed and are tried again."),
    counter("baton_store_uploaded_bytes_total", "Bytes uploaded to the object store."),
)

GENERATORS_AND_WEIGHTS = (
    histogram("baton_generator_wait_seconds", "A generator's wait for work.", labels=("reason",), buckets=SECONDS),
    counter("baton_generated_tokens_total", "Tokens that the engines sampled."),
    gauge("baton_generator_running_requests", "Turns that an engine is generating."),
    gauge("baton_generator_waiting_requests", "Turns that wait for a place in an engine's batch."),
    gauge("baton_generator_kv_cache_ratio", "Fraction of an engine's KV cache in use."),
    counter("baton_generator_preemptions_total", "Turns preempted because the KV cache was full."),
    gauge("baton_generator_group_limit", "Groups that a generator may have open; lowered when the KV cache overflows."),
    counter("baton_prefix_cached_tokens_total", "Prompt tokens found in an engine's KV cache."),
    gauge("baton_generator_policy_version", "Optimizer steps of the policy that an engine serves."),
    gauge("baton_generator_evaluating", "1 while the generator evaluates."),
    gauge("baton_generators_expected", "Generators that joined and were not asked to leave."),
    histogram(
        "baton_trajectory_seconds", "Seconds by part: `queue`, `decode`, ...", labels=("env", "part"), buckets=SECONDS
    ),
    histogram("baton_tool_seconds", "Call of an environment, by tool.", labels=("env", "tool"), buckets=SECONDS),
    counter("baton_environment_errors_total", "Trajectories that a failed environment ended.", labels=("env",)),
    gauge("baton_environment_leaked_tasks", "Episodes whose environment did not return after it was cancelled."),
    counter("baton_agent_calls_total", "Answered calls of agents.", labels=("dialect", "how")),
    counter("baton_agent_refused_total", "Refused requests of agents, by HTTP status.", labels=("status",)),
    counter("baton_agent_undelivered_total", "Answers to agents that had left."),
    counter("baton_frozen_role_turns_total", "Turns: `answered` or `failed`.", labels=("step_role", "outcome")),
    counter("baton_frozen_role_seconds_total", "Seconds of waiting for frozen roles.", labels=("step_role",)),
    gauge("baton_agent_sessions", "Sessions: `calling`, `idle`, `finished`, `closed`.", labels=("state",)),
    gauge("baton_agent_oldest_session_seconds", "Age of the oldest session: `calling`, `idle`.", labels=("state",)),
    counter("baton_agent_steps_total", "Calls of trajectories that ended.", labels=("step_role",)),
    histogram("baton_agent_roots_per_trajectory", "Conversations of a trajectory; titles count.", buckets=TURNS),
    histogram("baton_weight_sync_seconds", "From sending to serving weights.", "timing/sync_weights", buckets=SECONDS),
    histogram("baton_weight_sync_pause_seconds", "Pause of an engine to load new weights.", buckets=SECONDS),
    counter("baton_weight_sync_bytes_total", "Bytes of weights that an engine loaded."),
    counter("baton_weight_sent_bytes_total", "Bytes of weights sent to other hosts."),
    counter("baton_weight_sync_failures_total", "Weight updates that failed in an engine."),
)

SERVICE = (
    gauge("baton_run_info", "Always 1; the labels name the run.", labels=("run", "baton_version")),
    gauge("baton_run_state", "1 for the run's current state.", labels=("state",)),
    gauge("baton_binding_ratio", "Share of each part in the last ten minutes; waits are divided.", labels=("part",)),
    gauge("baton_actor_host_info", "Always 1, with the address of the actor's host.", labels=("host",)),
    gauge("baton_actor_up", "1 while the actor pushes metrics, 0 when it is silent."),
    gauge("baton_actor_age_seconds", "Seconds since the actor last pushed metrics."),
    counter("baton_state_seconds_total", "Seconds that the actor spent in each state.", labels=("state",)),
    counter("baton_process_cpu_seconds_total", "CPU seconds of the actor's process."),
    gauge("baton_process_resident_memory_bytes", "Resident memory of the actor's process."),
    counter("baton_metrics_seconds_total", "CPU seconds spent on metrics."),
)

TABLE: tuple[Metric, ...] = (*LENGTHS_AND_PADDING, *BUFFER, *TRAINER, *GENERATORS_AND_WEIGHTS, *SERVICE)

BY_NAME = {metric.name: metric for metric in TABLE}

STEP_KEYS: dict[str, str] = {
    "trainer/incarnation": "Incarnation of the trainer; with the step it is the policy's version.",
    "trainer/gpu_reserved_bytes": "Most memory that a rank has reserved on its GPU.",
    "reward/mean_positive_reward": "Mean return, negative ones counted as 0.",
    "reward/avg_pass_at_<n>": "Fraction of groups, filtered ones too, in whose `<n>` samples a return is positive.",
    "reward/groups_without_credit": "With credit by turn: fraction of groups whose advantages are all 0.",
    "role/<role>/reward": "Mean return of a role, over the trajectories in which it had a turn.",
    "role/<role>/turns": "Mean turns of a role, over the same trajectories.",
    "role/<role>/groups_without_credit": "Fraction of groups in which every advantage of the role is 0.",
    "generate/batch_num_seq": "Rows of the mini-batch.",
    "generate/batch_num_tokens": "Tokens of its rows.",
    "generate/merge_ratio": "Steps for each row.",
    "generate/tokens_before_merge": "Tokens that the rows would have without merging.",
    "generate/tokens_after_merge": "Tokens of the merged rows.",
    "generate/steps_extended": "Steps that extended the row of the previous step.",
    "generate/steps_forked": "Steps that began a row: they left an earlier step's sampled text.",
    "generate/steps_reset": "Steps that began a row: they share at most a first prompt.",
    "generate/batch_imbalance": "Cost of the most loaded rank, over the mean.",
    "generate/batch_computed_ratio": "Computed tokens over all; above the distinct ratio where ranks repeat a prefix.",
    "generate/batch_num_micro_batches": "Micro-batches of all ranks.",
    "generate/batch_num_dummies": "Micro-batches without rows: all ranks need the same number.",
    "generate/filtered_groups": "Groups that filters removed since the mini-batch before.",
    "generate/filtered_tokens": "Sampled tokens of those groups.",
    "generate/tokens_per_kept_token": "Sampled tokens, also of filtered groups, over the mini-batch's tokens.",
    "generate/avg_num_tokens": "Mean tokens after the first prompt, observations included.",
    "generate/avg_assistant_tokens": "Mean sampled tokens.",
    "generate/avg_num_turns": "Mean turns.",
    "generate/avg_response_length": "Mean tokens of a response; each turn is one.",
    "generate/std_response_length": "Their standard deviation.",
    "generate/min_response_length": "Tokens of the shortest response.",
    "generate/max_response_length": "Tokens of the longest response.",
    "generate/truncated_ratio_turn_<turns>": "Fraction of the responses of turns `1`, `2`, `3`, `4`, `5_8`, ... cut.",
    "tokens/loss": "Sampled tokens that carry loss.",
    "tokens/untrained": "Sampled tokens without loss because of their step's role.",
    "tokens/masked": "Sampled tokens without loss for another reason than staleness or role.",
    "async/staleness_max": "Largest staleness of a sampled token.",
    "async/stale_tokens": "Tokens too stale to carry loss.",
    "async/stale_tokens_quarter_<q>": "The same in a quarter of the trajectories by length; 4: the longest.",
    "async/trainer_wait_fraction": "Fraction of the steps' time that the trainer waited for a mini-batch.",
    "async/generator_wait_fraction": "Fraction of the generators' time without any group.",
    "policy/is_ratio_std": "Standard deviation of the importance ratios.",
    "policy/is_ratio_max": "Largest importance ratio.",
    "policy/effective_sample_fraction": "Effective sample size by the ratios, (sum r)^2 / (n sum r^2), 0 to 1.",
    "policy/loss_metrics/masked_ratio": "Fraction of loss tokens whose loss a correction set to 0.",
    "policy/loss_metrics/truncated_ratio": "Fraction of loss tokens whose importance weight was truncated.",
    "policy/reference_kl": "Approximate KL from the reference weights (`algorithm.kl_coef`).",
    "policy/teacher_kl": "Mean log-ratio of rollout to teacher: the reverse KL.",
    "policy/teacher_token_ratio": "Fraction of the loss tokens that have a teacher.",
    "policy/by_staleness/<versions>/tokens": "Loss tokens of this staleness.",
    "policy/by_staleness/<versions>/<name>": (
        "`is_ratio_mean`, `is_ratio_std`, `is_ratio_max`, `effective_sample_fraction`, `kl` or `clip_ratio` of them."
    ),
    "policy/by_staleness/<versions>/differing_fraction": "Fraction of them that differ by more than rounding.",
    "time": "When the step ended, in UTC, such as `2026-05-04T03:02:01.000+00:00`.",
    "bound_by": (
        "Most of the step's time: `generation` (the trainer waited), `scorers`, `training`, `weights`, `evaluation`, "
        "`checkpoint`, `commit` or `bookkeeping`."
    ),
    "timing/since_start": "Seconds of the run, its start and its earlier processes included.",
    "timing/eval": "Seconds of the evaluation that ended with this step.",
    "eval/step": "Step whose weights were evaluated.",
    "eval/<set>/avg_score": "Mean return over the evaluation set.",
    "eval/<set>/pass_at_<k>": "Chance that one of `<k>` samples of a prompt has a positive return.",
    "eval/<set>/avg_turns": "Mean turns of an evaluated trajectory.",
    "eval/<set>/avg_tokens": "Mean sampled tokens of an evaluated trajectory.",
    "eval/<set>/truncated_ratio": "Fraction of the evaluated responses cut at the limit.",
    "eval/<set>/lost_trajectories": "Evaluated trajectories that engine or environment lost; no mean counts them.",
    "environment/<environment>/<name>": "Mean of the environment's `info` over the mini-batch's trajectories.",
}
