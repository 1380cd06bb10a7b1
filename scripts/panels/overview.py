"""The dashboard of the run as a whole."""

from __future__ import annotations

from scripts.panels.parts import RUN, Dashboard, Panel, Query, last, mean, rate, share, spread

OVERVIEW = Dashboard(
    "baton-overview",
    "Baton: overview",
    "Is the run alive, does it learn, and who waits for whom.",
    (
        Panel("Step", "none", (Query(last("baton_policy_version")),), "Optimizer steps so far.", 4, "stat"),
        Panel("Reward", "none", (Query(last("baton_reward")),), "Mean reward of the last mini-batch.", 4, "stat"),
        Panel(
            "Since the last step",
            "s",
            (Query(f"time() - {last('baton_last_optimizer_step_timestamp_seconds')}"),),
            "Half of the stall deadline fires BatonTrainerStalled.",
            4,
            "stat",
        ),
        Panel(
            "Generators",
            "none",
            (Query('sum by (instance) (baton_actor_up{instance=~"$instance", role="generator"})'),),
            "Generators that push numbers.",
            4,
            "stat",
        ),
        Panel(
            "Trainer waits",
            "percentunit",
            (Query(share("baton_trainer_wait_seconds_sum", "baton_step_seconds_sum")),),
            "High: generation is the bottleneck.",
            4,
            "stat",
        ),
        Panel(
            "Padded length",
            "none",
            (Query(last("baton_batch_padded_sequence_length_last_tokens")),),
            "Tokens to which the last batch is padded, or would be.",
            4,
            "stat",
        ),
        Panel("Reward over time", "none", (Query(last("baton_reward"), "{{instance}}"),), "Before any filter."),
        Panel(
            "Seconds a step",
            "s",
            (
                Query(mean("baton_step_seconds"), "step"),
                Query(share("baton_trainer_wait_seconds_sum", "baton_step_seconds_count"), "of which waiting"),
            ),
            "The time between two optimizer steps, and the trainer's share of waiting in it.",
        ),
        Panel(
            "Staleness",
            "none",
            (*spread("baton_staleness_versions"), Query(last("baton_staleness_budget_versions"), "budget")),
            "Versions between sampling and training of a loss token. Tokens beyond the budget carry no loss.",
        ),
        Panel(
            "Tokens a second",
            "none",
            (
                Query(rate("baton_generated_tokens_total"), "sampled"),
                Query(rate("baton_batch_sampled_tokens_total"), "trained"),
            ),
            "What the engines sample and what the trainer uses; the gap is waste or growth of the buffer.",
        ),
        Panel(
            "Actors heard",
            "s",
            (Query(f"baton_actor_age_seconds{RUN}", "{{ident}}"),),
            "Seconds since each actor pushed its numbers; over 10 it counts as silent.",
        ),
        Panel(
            "Memory",
            "bytes",
            (Query(f"baton_process_resident_memory_bytes{RUN}", "{{ident}}"),),
            "Resident memory of each actor's process.",
        ),
    ),
)
