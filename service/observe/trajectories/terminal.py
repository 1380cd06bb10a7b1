"""Trajectory records on a terminal: a list, and one trajectory with the kind of each token."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.observe.trajectories.records import Record
from service.observe.trajectories.tokens import (
    LEGEND,
    LOSS,
    MASKED,
    PROMPT,
    STALE,
    UNUSED,
    Words,
    fate_of,
    headline,
    number,
    step_line,
    tokens_of,
)

STYLES = {PROMPT: "dim", LOSS: "green", STALE: "yellow", MASKED: "magenta", UNUSED: "blue"}


def print_list(console: Console, records: Sequence[Record]) -> None:
    """Print a table with one line per trajectory."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("fate", no_wrap=True)
    for name in ("step", "return", "advantage", "turns", "rows", "loss tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ended by")
    for record in records:
        table.add_row(
            record["id"],
            fate_of(record),
            str(record["optimizer_step"]),
            number(record["return"], ".2f"),
            number(record["advantage"], "+.2f"),
            str(len(record["steps"])),
            str(record["rows"]),
            f"{record['loss_tokens']}/{record['sampled_tokens']}",
            record["stop_reason"],
        )
    console.print(table)


def print_record(console: Console, record: Record, max_staleness: int, words: Words) -> None:
    """Print one trajectory step by step; the colour of a token shows its kind."""
    console.print(Text(record["id"], style="bold"))
    console.print(Text(headline(record)))
    for kind, meaning in LEGEND.items():
        console.print(Text("  \u25a0 ", style=STYLES[kind]) + Text(meaning, style="dim"))
    for step in record["steps"]:
        console.print(Text(f"\nstep {step['index']}  {step_line(step)}", style="bold"))
        line = Text()
        for token in tokens_of(step, record, max_staleness, words):
            line.append(token.text, style=STYLES[token.kind])
        console.print(line)
