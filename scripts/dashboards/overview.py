"""The dashboard of the run as a whole."""

from __future__ import annotations

from scripts.dashboards.panels import Query, chosen, dashboard, distribution, graph, last, mean, rate, rate_ratio, stat

GENERATORS_UP = chosen("baton_actor_up", 'role="generator"')

OVERVIEW = dashboard(
    "baton-overview",
    "Baton: overview",
    "Is the run alive, does it learn, and which part waits.",
    (6, 2, 2, 2),
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
        "Fraction of time. A high value means that generation is the bottleneck.",
        rate_ratio("baton_trainer_wait_seconds_sum", "baton_step_seconds_sum"),
        unit="percentunit",
    ),
    stat(
        "Padded length",
        "Tokens to which the last batch is padded, or would be padded.",
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
)
