"""Prints trajectory records on a terminal: a list of trajectories, or one trajectory with the kind of each token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.errors import in_one_line
from service.run.trajectories import Record
from service.trace.tokens import (
    ASIDE,
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
    scored,
    sections,
)

STYLES = {PROMPT: "dim", LOSS: "green", STALE: "yellow", MASKED: "magenta", ASIDE: "cyan", UNUSED: "blue"}
MARKS = {
    PROMPT: ("", ""),
    LOSS: ("{+", "+}"),
    STALE: ("{~", "~}"),
    MASKED: ("{-", "-}"),
    ASIDE: ("{=", "=}"),
    UNUSED: ("{?", "?}"),
}
"""Marks around the tokens of each kind, for output without colours, such as a pipe."""

WIDE = 110
"""Minimum width of a terminal, in columns, at which a list shows all fields of a trajectory."""


def print_list(console: Console, records: Sequence[Record], kept: int) -> None:
    """Print a table with one line per trajectory; if it does not show all `kept` trajectories, a note below says so."""
    is_wide = console.width >= WIDE
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("fate", overflow="fold")
    for name in _numbers(records[0], is_wide) if records else ():
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ended by", overflow="fold")
    for record in records:
        fate = fate_of(record) if is_wide else record["fate"]
        cells = (record["id"], fate, *_numbers(record, is_wide).values(), record["stop_reason"])
        table.add_row(*(Text(in_one_line(cell)) for cell in cells))
    console.print(table)
    notes = [] if len(records) == kept else [f"the newest {len(records)} of {kept} kept trajectories (--last N)"]
    notes += [] if is_wide else [f"reasons, advantage, turns and rows are shown from {WIDE} columns on"]
    if notes:
        console.print(Text("; ".join(notes), style="dim"))


def _numbers(record: Record, is_wide: bool) -> dict[str, str]:
    """The numeric columns of a trajectory: name -> text."""
    wide = {
        "advantage": number(record["advantage"], "+.2f"),
        "turns": str(len(record["steps"])),
        "rows": str(record["rows"]),
    }
    return {
        "step": str(record["optimizer_step"]),
        "return": number(record["return"], ".2f"),
        **(wide if is_wide else {}),
        "loss tokens": f"{record['loss_tokens']}/{record['sampled_tokens']}",
    }


def print_record(console: Console, record: Record, max_staleness: int, words: Words) -> None:
    """Print one trajectory, one step after the other. Colours show the kind of each token; on a terminal without
    colours, marks show it."""
    has_colours = console.color_system is not None and not console.no_color
    wraps = not console.is_terminal
    console.print(Text(in_one_line(record["id"]), style="bold"))
    for said in (headline(record), *scored(record)):
        console.print(Text(in_one_line(said)), soft_wrap=wraps)
    for kind, meaning in LEGEND.items():
        sign = "\u25a0" if has_colours else " ".join(MARKS[kind]).strip() or "plain"
        console.print(Text(f"  {sign} ", style=STYLES[kind]) + Text(meaning, style="dim"))
    for title, tokens in sections(record, max_staleness, words):
        console.print(Text(f"\n{in_one_line(title)}", style="bold"), soft_wrap=wraps)
        line = Text()
        for kind, same in groupby(tokens, key=lambda token: token.kind):
            begin, end = ("", "") if has_colours else MARKS.get(kind, ("", ""))
            line.append(begin + "".join(token.text for token in same) + end, style=STYLES.get(kind))
        console.print(line, soft_wrap=wraps)
