"""The dashboard of the token ledger."""

from __future__ import annotations

from scripts.dashboards.panels import Query, dashboard, graph, stat, total

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
