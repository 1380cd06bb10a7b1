"""The Grafana dashboards; `python -m scripts.docs` writes them as JSON."""

from __future__ import annotations

from scripts.dashboards.panels import (
    Query,
    chosen,
    dashboard,
    distribution,
    graph,
    heatmap,
    last,
    last_ratio,
    mean,
    mean_and_tail,
    rate,
    rate_ratio,
    stat,
    states,
    total,
)

GENERATORS_UP = chosen("baton_actor_up", 'role="generator"')

OVERVIEW = dashboard(
    "baton-overview",
    "Baton: overview",
    "Whether the run is alive and learns, and which part waits.",
    (6, 2, 2, 3),
    stat("Step", "Optimizer steps so far.", last("baton_policy_version")),
    stat("Reward", "Mean reward of the last mini-batch.", last("baton_reward")),
    stat(
        "Since the last step",
        "BatonTrainerStalled fires at half of the stall deadline.",
        f"time() - {last('baton_last_optimizer_step_timestamp_seconds')}",
        unit="s",
    ),
    stat("Generators", "Generators that push metrics.", f"sum by (instance) ({GENERATORS_UP})"),
    stat(
        "Trainer waits",
        "Fraction of time that the trainer waits. High if generation is the bottleneck.",
        rate_ratio("baton_trainer_wait_seconds_sum", "baton_step_seconds_sum"),
        unit="percentunit",
    ),
    stat(
        "Padded length",
        "Length in tokens to which the last batch is padded, or would be padded.",
        last("baton_batch_padded_sequence_length_last_tokens"),
    ),
    graph("Reward over time", "Mean reward, before any filter.", Query(last("baton_reward"), "{{instance}}")),
    graph(
        "Seconds a step",
        "Seconds between two optimizer steps, and how many of them the trainer waits.",
        Query(mean("baton_step_seconds"), "step"),
        Query(rate_ratio("baton_trainer_wait_seconds_sum", "baton_step_seconds_count"), "of which waiting"),
        unit="s",
    ),
    graph(
        "Staleness",
        "Versions between sampling and training of a loss token. Tokens beyond the budget carry no loss.",
        *distribution("baton_staleness_versions"),
        Query(last("baton_staleness_budget_versions"), "budget"),
    ),
    graph(
        "Tokens a second",
        "Sampled tokens and trained tokens. The gap between them is waste, or growth of the buffer.",
        Query(rate("baton_generated_tokens_total"), "sampled"),
        Query(rate("baton_batch_sampled_tokens_total"), "trained"),
    ),
    graph(
        "Last push",
        "Seconds since each actor pushed its metrics; over 10 the actor counts as silent.",
        Query(chosen("baton_actor_age_seconds"), "{{ident}}"),
        unit="s",
    ),
    graph(
        "Memory",
        "Resident memory of each actor's process.",
        Query(chosen("baton_process_resident_memory_bytes"), "{{ident}}"),
        unit="bytes",
    ),
    graph(
        "What binds",
        "Fraction of the last ten minutes of optimizer steps that each part took; waits are divided.",
        Query(chosen("baton_binding_ratio"), "{{part}}"),
        unit="percentunit",
    ),
)

INFLATION = last_ratio("baton_batch_padded_sequence_length_last_tokens", "baton_batch_longest_row_tokens")

SEQUENCES = dashboard(
    "baton-sequences",
    "Baton: sequences and padding",
    "The lengths of rows, the cost of padding, and whether steps merge.",
    (2, 3, 2, 2, 1),
    graph(
        "Padded length of mini-batches",
        "Whole sequences are padded on the left, so the padded length is the length of the longest row.",
        *distribution("baton_batch_padded_sequence_length_tokens"),
        Query(last("baton_batch_padded_sequence_length_alert_tokens"), "alert threshold"),
    ),
    graph(
        "Fraction of long mini-batches",
        "Exact fraction of batches beyond the alert threshold (a recording rule of rules.yaml).",
        Query(chosen("instance:baton_long_batches:ratio_rate15m"), "{{instance}}"),
        unit="percentunit",
    ),
    graph("Inflation", "Must be 1: more is a defect of the layout.", Query(INFLATION, "padded / longest")),
    graph(
        "Padding",
        "Fraction of positions without a token. The packed layout computes none of them.",
        Query(rate_ratio("baton_batch_padding_tokens_total", "baton_batch_tokens_total"), "mean"),
        Query(last("baton_batch_padding_ratio"), "last batch"),
        unit="percentunit",
    ),
    graph(
        "Rows a step",
        "Few rows per step mean that steps merge; mismatches are steps that do not extend the previous one.",
        Query(rate_ratio("baton_rows_after_merge_total", "baton_rows_before_merge_total"), "rows / steps"),
        Query(rate_ratio("baton_prefix_mismatch_total", "baton_rows_before_merge_total"), "mismatches"),
        unit="percentunit",
    ),
    graph("Row length", "Training rows, after merging.", *distribution("baton_row_length_tokens")),
    graph("Turns", "Turns of completed trajectories.", *distribution("baton_trajectory_turns")),
    graph("Prompt of a step", "The whole prompt of a turn.", *distribution("baton_step_prompt_length_tokens")),
    graph("Response of a step", "The response of a turn.", *distribution("baton_step_response_length_tokens")),
    heatmap(
        "Row lengths, distribution",
        "The lengths of training rows. A second band far above the first makes padding expensive.",
        "baton_row_length_tokens",
    ),
)


GROUPS_IN_FLIGHT = chosen("baton_buffer_groups", 'state=~"issued|open|scoring|complete|leased"')

BUFFER = dashboard(
    "baton-buffer",
    "Baton: buffer and staleness",
    "Open work, its staleness, refused messages, and scorers.",
    (2, 3, 3, 2),
    graph(
        "Groups by state",
        "Work in flight. If groups pile up in `complete`, the trainer is the bottleneck; if none is there, "
        "generation is.",
        Query(f"sum by (state) ({GROUPS_IN_FLIGHT})", "{{state}}"),
        stacked=True,
    ),
    heatmap(
        "Staleness, distribution",
        "Loss tokens by the versions between sampling and training.",
        "baton_staleness_versions",
    ),
    graph(
        "Too stale",
        "Fraction of sampled tokens that were older than the budget and carried no loss.",
        Query(rate_ratio("baton_batch_stale_tokens_total", "baton_batch_sampled_tokens_total"), "masked"),
        unit="percentunit",
    ),
    graph(
        "Reserved",
        "Fraction of buffer.max_bytes (the worst case of open groups), and of the journal's room for steps.",
        Query(last_ratio("baton_buffer_reserved_bytes", "baton_buffer_limit_bytes"), "memory"),
        Query(last_ratio("baton_journal_bytes", "baton_journal_limit_bytes"), "journal"),
        unit="percentunit",
    ),
    graph(
        "Trainer waits",
        "Seconds that the trainer waited for a mini-batch.",
        *mean_and_tail("baton_trainer_wait_seconds"),
        unit="s",
    ),
    graph("Accepted", "Accepted tokens a second.", Query(rate("baton_accepted_tokens_total"), "tokens")),
    graph(
        "Refused",
        "Refused messages a second, by reason.",
        Query(rate("baton_refused_messages_total", "reason"), "{{reason}}"),
    ),
    graph(
        "Restarted",
        "Trajectories a second that started again, by reason.",
        Query(rate("baton_restarted_trajectories_total", "reason"), "{{reason}}"),
    ),
    graph(
        "Waiting for scorers",
        "Groups that are finished and wait for a judge, a reward model or a teacher.",
        Query(total("baton_scorer_waiting_groups", by="instance, scorer"), "{{scorer}}"),
    ),
    graph(
        "Answers of scorers",
        "Groups a second by outcome, and failures. BatonScorerFails fires above 20 % without a score.",
        Query(rate("baton_scorer_groups_total", "scorer, outcome"), "{{scorer}}: {{outcome}}"),
        Query(rate("baton_scorer_failures_total", "scorer, reason"), "{{scorer}}: failed, {{reason}}"),
    ),
)

VERSIONS_BEHIND = (
    f"{last('baton_policy_version')} - on (instance) group_right () {chosen('baton_generator_policy_version')}"
)


GENERATORS = dashboard(
    "baton-generators",
    "Baton: generators",
    "The work of the engines, their waits, how new weights reach them, and what agents call.",
    (2, 2, 3, 4, 4, 3),
    graph(
        "Tokens a second",
        "Sampled tokens of each engine.",
        Query(rate("baton_generated_tokens_total", "ident"), "{{ident}}"),
    ),
    graph(
        "Running turns",
        "Turns that each engine is generating.",
        Query(chosen("baton_generator_running_requests"), "{{ident}}"),
    ),
    graph(
        "Waiting for work",
        "Fraction of time, by reason: `lookahead` waits for the trainer, `bytes` for memory, `disk` for the journal.",
        Query(rate("baton_generator_wait_seconds_sum", "ident, reason"), "{{ident}} {{reason}}"),
        unit="percentunit",
    ),
    graph(
        "Versions behind",
        "The trainer's version minus the version that an engine serves.",
        Query(VERSIONS_BEHIND, "{{ident}}"),
    ),
    graph(
        "Weight updates",
        "Seconds from sending weights until every engine serves them.",
        *mean_and_tail("baton_weight_sync_seconds"),
        unit="s",
    ),
    graph(
        "Pause for weights",
        "Seconds for which an engine stops generating to load new weights.",
        Query(mean("baton_weight_sync_pause_seconds"), "mean"),
        unit="s",
    ),
    graph(
        "Weights sent and loaded",
        "Bytes a second. Hosts pass weights on to each other: the trainer sends them once, each engine loads them all.",
        Query(rate("baton_weight_sent_bytes_total"), "left the trainer"),
        Query(rate("baton_weight_sync_bytes_total"), "loaded by engines"),
        unit="Bps",
    ),
    graph(
        "Failures",
        "Failed updates, and trajectories that ended because their environment failed, a second.",
        Query(rate("baton_weight_sync_failures_total"), "weight updates"),
        Query(rate("baton_environment_errors_total", "env"), "environment {{env}}"),
    ),
    graph(
        "How trajectories end",
        "Completed trajectories a second, by stop reason.",
        Query(rate("baton_completed_trajectories_total", "stop_reason"), "{{stop_reason}}"),
        stacked=True,
    ),
    graph(
        "Cut responses",
        "Fraction of the responses that reached `generator.max_generate_length`, by turn.",
        Query(rate_ratio("baton_truncated_responses_total", "baton_responses_total", "turns"), "turn {{turns}}"),
        unit="percentunit",
    ),
    graph(
        "Calls of agents",
        "Calls a second, by how their prompts came about. BatonAgentsRewriteHistory fires above 5 % of `rerendered`.",
        Query(rate("baton_agent_calls_total", "how"), "{{how}}"),
        stacked=True,
    ),
    graph(
        "Sessions of agents",
        "Open sessions: `calling` ones wait for the policy, `idle` ones for their agent.",
        Query(total("baton_agent_sessions", 'state=~"calling|idle"', by="instance, state"), "{{state}}"),
    ),
    graph(
        "Steps of agents",
        "Calls of trajectories that ended, a second, by role; answers nobody received.",
        Query(rate("baton_agent_steps_total", "step_role"), "{{step_role}}"),
        Query(rate("baton_agent_undelivered_total"), "client had left"),
    ),
    graph(
        "Conversations of an agent",
        "Conversations in one trajectory: titles, sub-agents and edited histories count.",
        *distribution("baton_agent_roots_per_trajectory"),
    ),
    graph(
        "Leaked episodes",
        "Episodes whose environment did not return after it was cancelled; beyond a bound the generator is renewed.",
        Query(chosen("baton_environment_leaked_tasks"), "{{ident}}"),
    ),
    graph(
        "What engines do",
        "Fraction of time: `environment` waits for environments or agents, `waiting` for groups, `paused` for weights.",
        Query(states("generator", "ident, state"), "{{ident}} {{state}}"),
        unit="percentunit",
        stacked=True,
    ),
    graph(
        "Where trajectories spend their time",
        "Trajectories at work on each part, on average.",
        Query(rate("baton_trajectory_seconds_sum", "env, part"), "{{env}} {{part}}"),
        stacked=True,
    ),
    graph(
        "Calls of environments",
        "Mean seconds of a call, by tool.",
        Query(rate_ratio("baton_tool_seconds_sum", "baton_tool_seconds_count", "env, tool"), "{{env}} {{tool}}"),
        unit="s",
    ),
)

TRAINER = dashboard(
    "baton-trainer",
    "Baton: trainer",
    "Whether the optimization behaves.",
    (3, 3, 3, 3, 3),
    graph("Reward", "Mean reward of the mini-batch.", Query(last("baton_reward"), "reward")),
    graph("Loss", "Near zero by construction.", Query(last("baton_policy_loss"), "loss")),
    graph(
        "Entropy", "Entropy of the policy. A sudden fall is a collapse.", Query(last("baton_policy_entropy"), "entropy")
    ),
    graph(
        "Divergence",
        "Between trainer and sampling policy. On fresh tokens it is near zero; more is a mismatch of engine "
        "and trainer.",
        Query(last("baton_policy_kl"), "all tokens"),
        Query(last("baton_fresh_token_kl"), "fresh tokens"),
    ),
    graph(
        "Importance ratio",
        "Mean of trainer over sampling probability; far from 1 when the data is too stale.",
        Query(last("baton_importance_ratio_mean"), "mean"),
    ),
    graph(
        "Clipped",
        "Fraction of loss tokens that are clipped.",
        Query(last("baton_clip_ratio"), "fraction"),
        unit="percentunit",
    ),
    graph("Gradient norm", "Norm of the gradient before clipping.", Query(last("baton_grad_norm"), "norm")),
    graph("Learning rate", "Learning rate of the last step.", Query(last("baton_learning_rate"), "lr")),
    graph(
        "Steps",
        "Optimizer steps a second. An aborted step changes nothing, and its batch is leased again.",
        Query(rate("baton_optimizer_steps_total"), "applied"),
        Query(rate("baton_aborted_steps_total"), "aborted"),
    ),
    graph(
        "Object store",
        "With `run.store`: steps since the newest checkpoint there, and uploads that failed and are tried again.",
        Query(f"{last('baton_policy_version')} - on (instance) {last('baton_store_checkpoint_step')}", "steps behind"),
        Query(rate("baton_store_failures_total"), "failures a second"),
    ),
    graph(
        "Groups without variance",
        "Fraction of groups, filtered ones too, whose returns are all equal: they teach nothing. All zero: the tasks "
        "are too hard, or rewards are missing. All one: too easy.",
        Query(last("baton_groups_without_variance"), "all equal"),
        Query(last("baton_groups_all_zero"), "all zero"),
        Query(last("baton_groups_all_one"), "all one"),
        unit="percentunit",
    ),
    graph(
        "Curriculum",
        "Prompts by their success so far: `below` the band of `data.curriculum`, `inside` or `above`.",
        Query(total("baton_curriculum_prompts", by="instance, success"), "{{success}}"),
        stacked=True,
    ),
    graph(
        "Prompts passed over",
        "Prompts a second that the curriculum skips, so that no tokens are sampled for them.",
        Query(rate("baton_curriculum_passed_over_total"), "passed over"),
    ),
    graph(
        "Evaluations",
        "Intervals of `data.eval_every` since the newest evaluated step; above 2, evaluations take too long.",
        Query(last("baton_evaluation_lag_intervals"), "behind"),
    ),
    graph(
        "What the trainer does",
        "Fraction of time: `waiting` for a mini-batch, `step`, `commit` to the journal, `weights`, `checkpoint`.",
        Query(states("driver", "state"), "{{state}}"),
        unit="percentunit",
        stacked=True,
    ),
)


USED = total("baton_tokens", 'fate=~"trained|stepped"')
DECIDED = total("baton_tokens", 'fate!="open"')

LEDGER = dashboard(
    "baton-ledger",
    "Baton: token ledger",
    "Where every accepted token is.",
    (1, 3),
    graph(
        "Tokens by fate",
        "Every accepted token has exactly one fate; the sum is the accepted tokens.",
        Query(total("baton_tokens", by="fate"), "{{fate}}"),
        stacked=True,
    ),
    stat(
        "Does the ledger close?",
        "Must be 0 at every scrape.",
        f"{total('baton_tokens')} - {total('baton_accepted_tokens_total')}",
        "difference",
    ),
    stat(
        "Used",
        "Fraction of the tokens with a decided fate that an optimizer step used.",
        f"{USED} / {DECIDED}",
        "fraction",
        unit="percentunit",
    ),
    graph(
        "Lost",
        "Tokens that no optimizer step will use, by fate.",
        Query(total("baton_tokens", 'fate!~"open|trained|stepped"', by="fate"), "{{fate}}"),
    ),
)

DASHBOARDS = (OVERVIEW, SEQUENCES, BUFFER, GENERATORS, TRAINER, LEDGER)
