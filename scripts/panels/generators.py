"""The dashboard of the generators and their engines."""

from __future__ import annotations

from scripts.panels.parts import RUN, Dashboard, Panel, Query, last, mean, mean_and_worst, rate

GENERATORS = Dashboard(
    "baton-generators",
    "Baton: generators",
    "What the engines do, what they wait for, and how new weights reach them.",
    (
        Panel(
            "Tokens a second",
            "none",
            (Query(rate("baton_generated_tokens_total", "ident"), "{{ident}}"),),
            "Sampled tokens of each engine.",
        ),
        Panel(
            "Running turns",
            "none",
            (Query(f"baton_generator_running_requests{RUN}", "{{ident}}"),),
            "Turns that each engine is generating.",
        ),
        Panel(
            "Waiting for work",
            "percentunit",
            (Query(rate("baton_generator_wait_seconds_sum", "ident, reason"), "{{ident}} {{reason}}"),),
            "Share of time, by reason: `lookahead` waits for the trainer, `bytes` for memory, `disk` for the journal.",
        ),
        Panel(
            "Versions behind",
            "none",
            (
                Query(
                    last("baton_policy_version")
                    + f" - on (instance) group_right () baton_generator_policy_version{RUN}",
                    "{{ident}}",
                ),
            ),
            "The trainer's version minus the one that an engine serves.",
        ),
        Panel(
            "Weight updates",
            "s",
            mean_and_worst("baton_weight_sync_seconds"),
            "Seconds from sending weights until every engine serves them.",
            8,
        ),
        Panel(
            "Pause for weights",
            "s",
            (Query(mean("baton_weight_sync_pause_seconds"), "mean"),),
            "Seconds that an engine stands still for one update.",
            8,
        ),
        Panel(
            "Failures",
            "none",
            (
                Query(rate("baton_weight_sync_failures_total"), "weight updates"),
                Query(rate("baton_environment_errors_total", "env"), "environment {{env}}"),
            ),
            "Failed updates, and trajectories that ended because their environment failed, a second.",
            8,
        ),
        Panel(
            "How trajectories end",
            "none",
            (Query(rate("baton_completed_trajectories_total", "stop_reason"), "{{stop_reason}}"),),
            "Completed trajectories a second, by stop reason.",
            24,
            stacked=True,
        ),
    ),
)
