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
    labels: tuple[str, ...] = ()
    key: str = ""
    """The key of `metrics.jsonl` from which the metric is recorded; empty if no key has the metric's quantity."""
    buckets: str = ""
    """The name of a histogram's bounds in `service.observe.metrics.bucket_bounds`; empty for other kinds."""
    in_ray: bool = False
    """Whether Ray's metrics endpoints also serve this gauge, as `ray_<name>`."""


gauge, counter, histogram = partial(Metric, "gauge"), partial(Metric, "counter"), partial(Metric, "histogram")

LENGTH, TURNS, STALENESS, SECONDS, FRACTION = "length", "turns", "staleness", "seconds", "fraction"

LENGTHS_AND_PADDING = (
    histogram(
        "baton_batch_padded_sequence_length_tokens",
        "Padded length of a mini-batch; with the packed layout, the length that padding would give.",
        key="generate/batch_padded_seq_len",
        buckets=LENGTH,
    ),
    gauge(
        "baton_batch_padded_sequence_length_last_tokens",
        "Padded length of the last mini-batch.",
        key="generate/batch_padded_seq_len",
        in_ray=True,
    ),
    gauge(
        "baton_batch_padded_sequence_length_alert_tokens",
        "Padded length above which a mini-batch counts as long; a bound of the histogram's buckets.",
    ),
    gauge(
        "baton_batch_longest_row_tokens",
        "Longest row of the last mini-batch, before packing.",
        key="generate/batch_longest_row",
    ),
    gauge(
        "baton_batch_truncated_ratio",
        "Fraction of the responses of the last mini-batch that were cut at `generator.max_generate_length`.",
        key="generate/truncated_ratio",
    ),
    gauge(
        "baton_batch_padding_ratio",
        "Fraction of the positions of the last padded batch that hold no token.",
        key="generate/batch_padding_ratio",
    ),
    histogram(
        "baton_batch_distinct_ratio",
        "Distinct tokens of a mini-batch, as a fraction of all: a prefix that several rows share counts once.",
        key="generate/batch_distinct_ratio",
        buckets=FRACTION,
    ),
    counter("baton_batch_tokens_total", "Positions of padded batches, padding included."),
    counter("baton_batch_padding_tokens_total", "Positions of padded batches that hold no token."),
    histogram("baton_row_length_tokens", "Length of a training row.", buckets=LENGTH),
    histogram("baton_step_prompt_length_tokens", "Length of a step's prompt.", buckets=LENGTH),
    histogram("baton_step_response_length_tokens", "Length of a step's response.", buckets=LENGTH),
    counter(
        "baton_rows_before_merge_total",
        "Steps of trained mini-batches; without merging each would be a row.",
        key="generate/num_seq_before_merge",
    ),
    counter("baton_rows_after_merge_total", "Rows of trained mini-batches.", key="generate/num_seq_after_merge"),
    counter(
        "baton_prefix_mismatch_total",
        "Steps that did not extend the step before them.",
        key="generate/prefix_mismatches",
    ),
    histogram("baton_trajectory_turns", "Turns of a completed trajectory.", buckets=TURNS),
    counter("baton_responses_total", "Responses of the policy, by their turn, counted from 1.", ("turns",)),
    counter("baton_truncated_responses_total", "Responses cut at `generator.max_generate_length`.", ("turns",)),
)

BUFFER = (
    histogram("baton_staleness_versions", "Versions between sampling and training, per loss token.", buckets=STALENESS),
    gauge(
        "baton_staleness_mean_versions",
        "Mean staleness of the loss tokens of the last mini-batch.",
        key="async/staleness_mean",
        in_ray=True,
    ),
    gauge("baton_staleness_budget_versions", "Staleness beyond which a token carries no loss."),
    counter(
        "baton_batch_sampled_tokens_total",
        "Tokens of trained mini-batches that a policy sampled.",
        key="tokens/sampled",
    ),
    counter(
        "baton_batch_stale_tokens_total",
        "Tokens of trained mini-batches that were too stale to carry loss.",
        key="tokens/stale",
    ),
    gauge("baton_buffer_groups", "Groups, by state.", ("state",), in_ray=True),
    gauge("baton_buffer_reserved_bytes", "Bytes that admitted groups may need at worst."),
    gauge("baton_buffer_limit_bytes", "Bytes that admission may reserve."),
    gauge("baton_tokens", "Accepted tokens by fate; every token has exactly one fate.", ("fate",)),
    counter("baton_refused_messages_total", "Messages that the buffer refused.", ("reason",)),
    counter("baton_accepted_tokens_total", "Tokens that the buffer accepted, each counted once."),
    counter(
        "baton_restarted_trajectories_total", "Trajectories that started again as their next attempt.", ("reason",)
    ),
    counter(
        "baton_given_up_trajectories_total",
        "Trajectories whose last attempt failed or came too late, or that a scorer gave no reward; their group goes on "
        "without them.",
        ("reason",),
    ),
    counter("baton_completed_trajectories_total", "Completed trajectories, by stop reason.", ("stop_reason",)),
    gauge(
        "baton_length_distance",
        "Distance between the length distributions of trained and of generated work, 0 to 1.",
        ("of",),
    ),
    counter(
        "baton_scorer_groups_total",
        "Groups by what became of them at a scorer: `scored`, `fallback` (continued without it) or `refused`.",
        ("scorer", "outcome"),
    ),
    counter(
        "baton_scorer_failures_total",
        "Times that a scorer was asked about a group and gave no good answer.",
        ("scorer", "reason"),
    ),
    counter("baton_scorer_seconds_total", "Seconds in which a scorer's workers were busy with groups.", ("scorer",)),
    gauge("baton_scorer_waiting_groups", "Groups that wait for a scorer.", ("scorer",)),
    gauge("baton_journal_bytes", "Size of the journal on disk."),
    gauge("baton_journal_limit_bytes", "Size of the journal beyond which no more groups are admitted."),
    counter("baton_journal_syncs_total", "Times that the journal was written to the disk."),
)

TRAINER = (
    gauge("baton_policy_version", "Optimizer steps of the newest policy.", key="trainer/global_step", in_ray=True),
    counter("baton_optimizer_steps_total", "Optimizer steps since the run started."),
    counter("baton_aborted_steps_total", "Optimizer steps that were not applied."),
    gauge("baton_last_optimizer_step_timestamp_seconds", "Unix time of the last optimizer step."),
    gauge("baton_stall_deadline_seconds", "Seconds without an optimizer step after which the run ends."),
    histogram("baton_step_seconds", "Seconds from one optimizer step to the next.", key="timing/step", buckets=SECONDS),
    histogram(
        "baton_trainer_wait_seconds",
        "Seconds that the trainer waited for a mini-batch.",
        key="timing/wait_for_generation_buffer",
        buckets=SECONDS,
    ),
    gauge("baton_reward", "Mean reward of the last mini-batch, before any filter.", key="reward/avg_raw_reward"),
    gauge(
        "baton_groups_without_variance",
        "Fraction of groups whose returns are all equal, which teach nothing; filtered groups count too.",
        key="reward/groups_without_variance",
    ),
    gauge(
        "baton_curriculum_prompts",
        "Prompts by their success so far: untried, below the band of `data.curriculum`, inside or above.",
        ("success",),
    ),
    counter("baton_curriculum_passed_over_total", "Prompts that the curriculum passed over."),
    gauge(
        "baton_evaluation_lag_intervals",
        "Optimizer steps since the newest step whose evaluation has finished, divided by `data.eval_every`.",
        key="eval/lag_intervals",
    ),
    gauge("baton_groups_all_zero", "Fraction of groups of which every return is 0.", key="reward/groups_all_zero"),
    gauge("baton_groups_all_one", "Fraction of groups of which every return is 1.", key="reward/groups_all_one"),
    gauge("baton_policy_loss", "Loss of the last optimizer step.", key="policy/policy_loss"),
    gauge("baton_policy_entropy", "Entropy of the policy in the last step.", key="policy/policy_entropy"),
    gauge(
        "baton_policy_kl",
        "Approximate divergence of trainer and sampling policy in the last step.",
        key="policy/policy_kl",
    ),
    gauge(
        "baton_fresh_token_kl",
        "Approximate divergence of trainer and engine over tokens that the current policy sampled; more than noise "
        "means that they compute differently.",
        key="policy/by_staleness/0/kl",
    ),
    gauge(
        "baton_importance_ratio_mean",
        "Mean ratio of trainer to sampling probabilities; near 1.",
        key="policy/is_ratio_mean",
    ),
    gauge(
        "baton_clip_ratio",
        "Fraction of loss tokens that were clipped in the last step.",
        key="policy/loss_metrics/clip_ratio",
    ),
    gauge("baton_grad_norm", "Norm of the gradient in the last step.", key="policy/grad_norm"),
    gauge("baton_learning_rate", "Learning rate of the last step.", key="policy/policy_lr"),
    gauge("baton_store_checkpoint_step", "Step of the newest checkpoint in the object store."),
    gauge("baton_store_failing", "1 while the newest upload to the object store failed, else 0."),
    counter("baton_store_failures_total", "Uploads to the object store that failed and are tried again."),
    counter("baton_store_uploaded_bytes_total", "Bytes that were uploaded to the object store."),
)

GENERATORS_AND_WEIGHTS = (
    histogram(
        "baton_generator_wait_seconds", "Seconds that a generator waited for work.", ("reason",), buckets=SECONDS
    ),
    counter("baton_generated_tokens_total", "Tokens that the engines sampled."),
    gauge("baton_generator_running_requests", "Turns that an engine is generating."),
    gauge("baton_generator_waiting_requests", "Turns that wait in an engine for a place in its batch."),
    gauge("baton_generator_kv_cache_ratio", "Fraction of an engine's KV cache in use."),
    counter("baton_generator_preemptions_total", "Turns that an engine preempted because its KV cache was full."),
    gauge("baton_generator_group_limit", "Groups that a generator may have open; lowered when the KV cache overflows."),
    counter("baton_prefix_cached_tokens_total", "Prompt tokens that an engine found in its KV cache."),
    gauge("baton_generator_policy_version", "Optimizer steps of the policy that an engine serves."),
    gauge("baton_generator_evaluating", "1 while the generator evaluates; beside training it keeps older weights."),
    gauge(
        "baton_generators_expected",
        "Generators that joined and were not asked to leave; no fewer than the run starts with.",
    ),
    histogram(
        "baton_trajectory_seconds",
        "Seconds of a trajectory by part: waiting in the engine (`queue`), `prefill`, `decode`, its requests paused "
        "for weights (`pause`), the `environment`, and all `other`, such as an agent's own work.",
        ("env", "part"),
        buckets=SECONDS,
    ),
    histogram("baton_tool_seconds", "Seconds of a call of an environment, by tool.", ("env", "tool"), buckets=SECONDS),
    counter("baton_environment_errors_total", "Trajectories that ended because their environment failed.", ("env",)),
    gauge(
        "baton_environment_leaked_tasks",
        "Episodes whose environment did not return after it was cancelled; beyond a bound the generator is renewed.",
    ),
    counter(
        "baton_agent_calls_total",
        "Answered calls of agents, by dialect and by how the prompt was made; `replayed`: an earlier answer again.",
        ("dialect", "how"),
    ),
    counter("baton_agent_refused_total", "Requests of agents that were refused, by HTTP status.", ("status",)),
    counter("baton_agent_undelivered_total", "Answers to agents that had left."),
    counter(
        "baton_frozen_role_turns_total",
        "Turns of frozen roles (`roles`): `answered` by their model, or `failed`, which costs the trajectory.",
        ("step_role", "outcome"),
    ),
    counter("baton_frozen_role_seconds_total", "Seconds of waiting for frozen roles' models.", ("step_role",)),
    gauge(
        "baton_agent_sessions",
        "Sessions of agents: open ones that wait for the policy (`calling`) or for their agent (`idle`); "
        "those that ended, `finished` by the agent or `closed`.",
        ("state",),
    ),
    counter("baton_agent_steps_total", "Calls of trajectories that ended, by role (`agents.train`).", ("step_role",)),
    histogram(
        "baton_agent_roots_per_trajectory", "Conversations of an agent's trajectory; titles count.", buckets=TURNS
    ),
    histogram(
        "baton_weight_sync_seconds",
        "Seconds from sending weights until the engines serve them; counted at the step in which they do.",
        key="timing/sync_weights",
        buckets=SECONDS,
    ),
    histogram(
        "baton_weight_sync_pause_seconds",
        "Seconds for which an engine stopped generating to load new weights.",
        buckets=SECONDS,
    ),
    counter(
        "baton_weight_sync_bytes_total",
        "Bytes of weights that an engine loaded; divided by the seconds of its pauses, bytes a second.",
    ),
    counter(
        "baton_weight_sent_bytes_total",
        "Bytes of weights that ranks sent to engines on other hosts (`weights.transport: memory`).",
    ),
    counter("baton_weight_sync_failures_total", "Weight updates that failed in an engine."),
)

SERVICE = (
    gauge("baton_run_info", "Always 1; the labels name the run.", ("run", "baton_version")),
    gauge("baton_run_state", "1 for the run's current state.", ("state",)),
    gauge(
        "baton_binding_ratio",
        "Fraction of the last ten minutes of optimizer steps that each part took; waits are divided.",
        ("part",),
    ),
    gauge("baton_actor_host_info", "1, with the address of the actor's host in the cluster.", labels=("host",)),
    gauge("baton_actor_up", "1 while the actor pushes metrics, 0 when it is silent."),
    gauge("baton_actor_age_seconds", "Seconds since the actor last pushed metrics."),
    counter(
        "baton_state_seconds_total",
        "Seconds that the actor spent in each state; the driver's are what the trainer as a whole does.",
        ("state",),
    ),
    counter("baton_process_cpu_seconds_total", "CPU seconds of the actor's process."),
    gauge("baton_process_resident_memory_bytes", "Resident memory of the actor's process."),
    counter("baton_metrics_seconds_total", "CPU seconds spent on measuring and pushing metrics."),
)

TABLE: tuple[Metric, ...] = (*LENGTHS_AND_PADDING, *BUFFER, *TRAINER, *GENERATORS_AND_WEIGHTS, *SERVICE)

BY_NAME = {metric.name: metric for metric in TABLE}

_RATIO = {
    "is_ratio_mean": "Mean importance ratio",
    "is_ratio_std": "Standard deviation of the importance ratios",
    "is_ratio_max": "Largest importance ratio",
    "effective_sample_fraction": "Effective sample size by the importance ratios, (sum r)^2 / (n sum r^2), 0 to 1,",
}
_AT_STALENESS = "at this staleness."

MAX_INFO_NAMES = 64
"""Maximum number of names in an environment's `info` whose means are kept, so that new names take bounded memory."""

STEP_KEYS: dict[str, str] = {
    "trainer/incarnation": "Incarnation of the trainer; with the step it is the policy's version.",
    "reward/mean_positive_reward": "Mean of the returns of the mini-batch, negative ones counted as 0.",
    "reward/avg_pass_at_<n>": "Fraction of groups, filtered ones too, in whose `<n>` samples a return is positive.",
    "reward/groups_without_credit": "With credit by turn: fraction of groups in which every advantage is 0.",
    "role/<role>/reward": "With `roles`: mean return of a role, over the trajectories in which it had a turn.",
    "role/<role>/turns": "With `roles`: mean turns of a role, over the trajectories in which it had a turn.",
    "role/<role>/groups_without_credit": "Fraction of groups in which every advantage of the role is 0.",
    "generate/batch_num_seq": "Rows of the mini-batch.",
    "generate/batch_num_tokens": "Tokens of the mini-batch's rows.",
    "generate/merge_ratio": "Steps for each row: how many turns share a row on average.",
    "generate/tokens_before_merge": "Tokens that the rows would have without merging.",
    "generate/tokens_after_merge": "Tokens of the merged rows.",
    "generate/steps_extended": "Steps that extended the row of the step before them.",
    "generate/steps_forked": "Steps that began another row because they left the sampled text of an earlier one.",
    "generate/steps_reset": "Steps that began another row because they share at most a first prompt.",
    "generate/batch_imbalance": "Cost of the most loaded rank, over the mean cost of a rank.",
    "generate/batch_computed_ratio": (
        "Computed tokens as a fraction of the tokens of all rows. It is above `generate/batch_distinct_ratio` where "
        "several ranks or micro-batches compute the same prefix."
    ),
    "generate/batch_num_micro_batches": "Micro-batches of all ranks.",
    "generate/batch_num_dummies": "Micro-batches without rows, added so that all ranks have the same number of them.",
    "generate/filtered_groups": "Groups that filters removed since the mini-batch before.",
    "generate/filtered_tokens": "Sampled tokens of the groups that filters removed since the mini-batch before.",
    "generate/tokens_per_kept_token": "Sampled tokens, those of filtered groups too, over the mini-batch's own.",
    "generate/avg_num_tokens": "Mean tokens of a trajectory after its first prompts, observations included.",
    "generate/avg_assistant_tokens": "Mean tokens of a trajectory that the policy sampled.",
    "generate/avg_num_turns": "Mean turns of a trajectory.",
    "generate/avg_response_length": "Mean tokens of a response; each turn of a trajectory is one.",
    "generate/std_response_length": "Standard deviation of the responses' lengths in tokens.",
    "generate/min_response_length": "Tokens of the shortest response.",
    "generate/max_response_length": "Tokens of the longest response.",
    "generate/truncated_ratio_turn_<turns>": (
        "Fraction of the responses of some turns that were cut at `generator.max_generate_length`: `<turns>` is `1`, "
        "`2`, `3`, `4`, `5_8`, `9_16`, `17_32` or `33_up`."
    ),
    "tokens/loss": "Sampled tokens that carry loss.",
    "tokens/untrained": "Sampled tokens without loss because of the role of their step (`agents.train`, `roles`).",
    "tokens/masked": "Sampled tokens that carry no loss for another reason than their staleness or their step's role.",
    "async/staleness_max": "Largest staleness of a token of the mini-batch that a policy sampled.",
    "async/stale_tokens": "Tokens too stale to carry loss.",
    "async/stale_tokens_quarter_<q>": (
        "Tokens too stale to carry loss, of a quarter of the trajectories by length; 4 has the longest."
    ),
    "async/trainer_wait_fraction": "Fraction of the steps' time for which the trainer waited for a mini-batch.",
    "async/generator_wait_fraction": (
        "Fraction of the generators' time without any group to play; waits for one more group do not count."
    ),
    "policy/is_ratio_std": f"{_RATIO['is_ratio_std']} of the loss tokens.",
    "trainer/gpu_reserved_bytes": "Most memory that a rank has reserved on its GPU since it started.",
    "policy/is_ratio_max": f"{_RATIO['is_ratio_max']} of a loss token.",
    "policy/effective_sample_fraction": f"{_RATIO['effective_sample_fraction']} of the loss tokens.",
    "policy/loss_metrics/masked_ratio": "Fraction of loss tokens whose loss a correction set to 0.",
    "policy/loss_metrics/truncated_ratio": "Fraction of loss tokens whose importance weight was truncated.",
    "policy/reference_kl": "Approximate divergence from the reference weights (`algorithm.kl_coef`).",
    "policy/teacher_kl": (
        "Mean log-ratio of rollout to teacher over the loss tokens that have a teacher: the reverse KL divergence."
    ),
    "policy/teacher_token_ratio": "Fraction of the loss tokens that have a teacher (`algorithm.teacher`).",
    "policy/by_staleness/<versions>/tokens": f"Number of loss tokens {_AT_STALENESS}",
    **{f"policy/by_staleness/<versions>/{name}": f"{text} {_AT_STALENESS}" for name, text in _RATIO.items()},
    "policy/by_staleness/<versions>/kl": f"Approximate divergence of trainer and sampling policy {_AT_STALENESS}",
    "policy/by_staleness/<versions>/clip_ratio": f"Clipped fraction {_AT_STALENESS}",
    "policy/by_staleness/<versions>/differing_fraction": (
        f"Fraction whose log-probability differs by more than `weights.verify_tolerance` {_AT_STALENESS}"
    ),
    "time": "When the step ended, in UTC, such as `2026-05-04T03:02:01.000+00:00`.",
    "bound_by": (
        "What took most of the step's time: `generation` (the trainer waited for a mini-batch), `training`, `weights`, "
        "`evaluation`, `checkpoint`, `commit` or `bookkeeping`."
    ),
    "timing/since_start": "Seconds for which the run has run, its start and its earlier processes included.",
    "timing/eval": "Seconds of the evaluation that ended with this step.",
    "eval/step": "Step whose weights were evaluated.",
    "eval/<set>/avg_score": "Mean return over the evaluation set.",
    "eval/<set>/pass_at_<k>": "Chance that one of `<k>` samples of a prompt has a positive return.",
    "eval/<set>/avg_turns": "Mean turns of an evaluated trajectory.",
    "eval/<set>/avg_tokens": "Mean sampled tokens of an evaluated trajectory.",
    "eval/<set>/truncated_ratio": "Fraction of the evaluated responses that were cut at the length limit.",
    "eval/<set>/lost_trajectories": "Evaluated trajectories that engine or environment lost; no mean counts them.",
    "environment/<environment>/<name>": (
        "Mean of what the environment returns as `info`, over the trajectories that ended since the step before; "
        f"at most {MAX_INFO_NAMES} names."
    ),
}

MEANINGS: dict[str, str] = {metric.key: metric.help for metric in reversed(TABLE) if metric.key} | STEP_KEYS
"""The meaning of every key of `metrics.jsonl`."""
