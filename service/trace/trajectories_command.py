"""`baton trajectories`: lists the trajectories that a run kept, and writes them as an HTML page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from service.errors import UserError, in_one_line
from service.run.folder import NEWEST_HELP, count

if TYPE_CHECKING:
    from rich.console import Console

    from service.run.records.trajectories import Record

ABOUT = "Show the trajectories that a run kept; run.trajectories_per_step says how many of each mini-batch."

EXAMPLES = """\
examples:
  baton trajectories list                                # of the newest run
  baton trajectories list runs/mine --failed             # attempts that failed
  baton trajectories export-html runs/quickstart --last 20   # what each token was, and what became of it
"""
PIPED_WIDTH = 200
"""Width of a table that is not written to a terminal, in columns."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `baton trajectories`."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, run, summary in (
        ("list", list_all, "print a line for each kept trajectory"),
        ("export-html", export, "write trajectories as an HTML page, with the treatment of each token"),
    ):
        added = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        added.set_defaults(command=run)
        added.add_argument("run", metavar="RUN", nargs="?", help=NEWEST_HELP)
        added.add_argument("--last", type=count, default=50, metavar="N", help="show only the last N (default 50)")
        added.add_argument("--failed", action="store_true", help="only attempts that failed")
    added.add_argument("--output", type=Path, metavar="FILE", help="default: trajectories.html in the run folder")


def list_all(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print a line for each recorded trajectory."""
    from rich.console import Console

    _, kept = _kept(arguments)
    print_list(Console(width=None if sys.stdout.isatty() else PIPED_WIDTH), kept[-arguments.last :], len(kept))
    return 0


def export(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Write trajectories as an HTML page."""
    from service.trace.trajectories_page import html_page

    folder, kept = _kept(arguments)
    records = kept[-arguments.last :]
    output = arguments.output or folder / "trajectories.html"
    output.write_text(html_page(f"Trajectories of {folder.name}", records, len(kept), *_how_to_show(folder)), "utf-8")
    print(f"{len(records)} of {len(kept)} kept trajectories written to {output}")
    return 0


def _kept(arguments: argparse.Namespace) -> tuple[Path, list[Record]]:
    """The folder of the run, and the records that the arguments name."""
    from service.run.records.trajectories import FAILED, find_recorded_run, load_records

    folder = find_recorded_run(arguments.run)
    return folder, [each for each in load_records(folder) if each["fate"] == FAILED or not arguments.failed]


def _how_to_show(folder: Path) -> tuple[int, Callable[[Sequence[int]], list[str]]]:
    """A run's maximum staleness, and a function from token ids to the text of each token."""
    from service.config import load
    from service.model_folder import TOKENIZER, read_tokenizer
    from service.run.folder import CONFIG, initial_model
    from service.trace.tokens import pieces

    config = load([folder / CONFIG], []).config
    file = initial_model(config.model, folder) / TOKENIZER
    if not file.is_file():
        raise UserError(f"{file}: no such file; the run's tokenizer is needed to show its tokens as text")
    tokenizer = read_tokenizer(file)
    return config.buffer.max_staleness, partial(
        pieces, lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    )


def print_list(console: Console, records: Sequence[Record], kept: int) -> None:
    """Print a table with one line per trajectory; if it does not show all `kept` trajectories, a note below says so."""
    from rich.table import Table
    from rich.text import Text

    from service.trace.tokens import fate_of, number

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("fate", overflow="fold")
    for name in ("step", "return", "turns", "loss tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ended by", overflow="fold")
    for record in records:
        tokens = f"{record['loss_tokens']}/{record['sampled_tokens']}"
        numbers = str(record["optimizer_step"]), number(record["return"], ".2f"), str(len(record["steps"])), tokens
        cells = record["id"], fate_of(record), *numbers, record["stop_reason"]
        table.add_row(*(Text(in_one_line(cell)) for cell in cells))
    console.print(table)
    if len(records) < kept:
        console.print(Text(f"the newest {len(records)} of {kept} kept trajectories (--last N)", style="dim"))
