"""The dashboard of the token ledger."""

from __future__ import annotations

from scripts.panels.parts import Dashboard, Panel, Query

LEDGER = Dashboard(
    "baton-ledger",
    "Baton: token ledger",
    "Where every accepted token is.",
    (
        Panel(
            "Tokens by fate",
            "none",
            (Query('sum by (fate) (baton_tokens{instance=~"$instance"})', "{{fate}}"),),
            "Every accepted token has exactly one fate; the sum is the accepted tokens.",
            24,
            stacked=True,
        ),
        Panel(
            "Does the ledger close?",
            "none",
            (
                Query(
                    'sum by (instance) (baton_tokens{instance=~"$instance"}) - '
                    'sum by (instance) (baton_accepted_tokens_total{instance=~"$instance"})',
                    "difference",
                ),
            ),
            "Must be 0 at every scrape.",
            8,
            "stat",
        ),
        Panel(
            "Used",
            "percentunit",
            (
                Query(
                    'sum by (instance) (baton_tokens{instance=~"$instance", fate=~"trained|stepped"}) / '
                    'sum by (instance) (baton_tokens{instance=~"$instance", fate!="open"})',
                    "share",
                ),
            ),
            "Share of the tokens whose fate is decided that an optimizer step used.",
            8,
            "stat",
        ),
        Panel(
            "Lost",
            "none",
            (Query('sum by (fate) (baton_tokens{instance=~"$instance", fate!~"open|trained|stepped"})', "{{fate}}"),),
            "Tokens that no optimizer step will use, by why.",
            8,
        ),
    ),
)
