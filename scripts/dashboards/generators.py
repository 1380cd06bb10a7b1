"""The dashboard of the generators and their engines."""

from __future__ import annotations

from scripts.dashboards.panels import Query, chosen, dashboard, graph, last, mean, mean_and_tail, rate

VERSIONS_BEHIND = (
    f"{last('baton_policy_version')} - on (instance) group_right () {chosen('baton_generator_policy_version')}"
)

GENERATORS = dashboard(
    "baton-generators",
    "Baton: generators",
    "The work of the engines, their waits, and how new weights reach them.",
    (2, 2, 3, 1),
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
)
