"""The dashboard of the buffer and of staleness."""

from __future__ import annotations

from scripts.dashboards.panels import (
    Query,
    chosen,
    dashboard,
    graph,
    heatmap,
    last_ratio,
    mean_and_tail,
    rate,
    rate_ratio,
)

GROUPS_IN_FLIGHT = chosen("baton_buffer_groups", 'state=~"issued|open|complete|leased"')

BUFFER = dashboard(
    "baton-buffer",
    "Baton: buffer and staleness",
    "Open work, its staleness, and refused messages.",
    (2, 3, 3),
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
        "Fraction of buffer.max_bytes (the worst case of open groups) and of buffer.max_journal_bytes.",
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
        "Trajectories a second that started again as their next attempt, by reason.",
        Query(rate("baton_restarted_trajectories_total", "reason"), "{{reason}}"),
    ),
)
