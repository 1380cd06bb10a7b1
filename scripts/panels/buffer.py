"""The dashboard of the buffer and of staleness."""

from __future__ import annotations

from scripts.panels.parts import Dashboard, Panel, Query, mean_and_worst, part, rate, share

BUFFER = Dashboard(
    "baton-buffer",
    "Baton: buffer and staleness",
    "What is open, how old it gets, and what was turned away.",
    (
        Panel(
            "Groups by state",
            "none",
            (
                Query(
                    'sum by (state) (baton_buffer_groups{instance=~"$instance", state=~"issued|open|complete|leased"})',
                    "{{state}}",
                ),
            ),
            "Work in flight. All waiting in `complete`: the trainer is the bottleneck; none there: generation is.",
            stacked=True,
        ),
        Panel(
            "Staleness, distribution",
            "none",
            (Query(rate("baton_staleness_versions_bucket", "le"), "{{le}}"),),
            "Loss tokens by the versions between sampling and training.",
            kind="heatmap",
        ),
        Panel(
            "Too stale",
            "percentunit",
            (Query(share("baton_batch_stale_tokens_total", "baton_batch_sampled_tokens_total"), "masked"),),
            "Share of sampled tokens that were older than the budget and carried no loss.",
            8,
        ),
        Panel(
            "Reserved",
            "percentunit",
            (
                Query(part("baton_buffer_reserved_bytes", "baton_buffer_limit_bytes"), "memory"),
                Query(part("baton_journal_bytes", "baton_journal_limit_bytes"), "journal"),
            ),
            "Of buffer.max_bytes (the worst case of open groups) and of buffer.max_journal_bytes.",
            8,
        ),
        Panel(
            "Trainer waits",
            "s",
            mean_and_worst("baton_trainer_wait_seconds"),
            "Seconds that the trainer waited for a mini-batch.",
            8,
        ),
        Panel(
            "Accepted",
            "none",
            (Query(rate("baton_accepted_tokens_total"), "tokens"),),
            "Tokens accepted a second.",
            8,
        ),
        Panel(
            "Refused",
            "none",
            (Query(rate("baton_refused_messages_total", "reason"), "{{reason}}"),),
            "Messages a second that were turned away at the door, by reason.",
            8,
        ),
        Panel(
            "Restarted",
            "none",
            (Query(rate("baton_restarted_trajectories_total", "reason"), "{{reason}}"),),
            "Trajectories that began anew as their next attempt.",
            8,
        ),
    ),
)
