"""`baton trajectories`: shows the trajectories that the policy played in a run, and where they spent their time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from service.errors import UserError
from service.run.arguments import NEWEST_HELP, count
from service.trace.trace_command import recorded

ABOUT = "Show the trajectories that a run kept; run.trajectories_per_step says how many of each mini-batch."

EXAMPLES = """\
examples:
  baton trajectories list                                # of the newest run
  baton trajectories list runs/mine --failed             # attempts that failed; show ID says why
  baton trajectories show runs/quickstart                # the newest trained one; or give an id
  baton trajectories slow runs/quickstart                # queue, prefill, decode, tools: where the time goes
  baton trajectories export-html runs/quickstart --last 20
"""
PIPED_WIDTH = 200
"""Width of a table that is not written to a terminal, in columns."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `baton trajectories`."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    added = {}
    for name, run, summary in (
        ("list", list_all, "print a line for each kept trajectory"),
        ("show", show, "print a trajectory; tokens with loss are coloured"),
        ("export-html", export, "write trajectories as an HTML page"),
        ("slow", slow, "where the time of trajectories goes, and the slowest ones"),
    ):
        added[name] = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        added[name].set_defaults(command=run)
        added[name].add_argument("run", metavar="RUN", nargs="?", help=NEWEST_HELP)
    named = "such as group=812/sample=3/attempt=0, or 812 (default: the newest trained trajectory)"
    added["show"].add_argument("id", metavar="ID", nargs="?", help=named)
    text = "the calls of this one, of those that the timeline keeps"
    added["slow"].add_argument("id", metavar="ID", nargs="?", help=text)
    text = "default: trajectories.html in the run folder"
    added["export-html"].add_argument("--output", type=Path, metavar="FILE", help=text)
    added["slow"].add_argument("--last", type=count, default=10, metavar="N", help="the N slowest (default 10)")
    for name in ("list", "export-html"):
        text = "the last N kept ones (default 50)"
        added[name].add_argument("--last", type=count, default=50, metavar="N", help=text)
    text = "only attempts that failed; `show` says why"
    added["list"].add_argument("--failed", action="store_true", help=text)


def list_all(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print a line for each recorded trajectory."""
    from rich.console import Console

    from service.run.trajectories import FAILED, find_recorded_run, load_records
    from service.trace.terminal import print_list

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    records = load_records(find_recorded_run(arguments.run))
    if arguments.failed:
        records = [record for record in records if record["fate"] == FAILED]
    print_list(console, records[-arguments.last :], len(records))
    return 0


def show(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print one trajectory."""
    from rich.console import Console

    from service.run.trajectories import find_record, find_recorded_run, load_records
    from service.trace.terminal import print_record

    folder = find_recorded_run(arguments.run)
    record = find_record(load_records(folder), arguments.id)
    print_record(Console(), record, *_how_to_show(folder))
    return 0


def export(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Write trajectories as an HTML page."""
    from service.run.trajectories import find_recorded_run, load_records
    from service.trace.trajectories_page import html_page

    folder = find_recorded_run(arguments.run)
    records = load_records(folder)
    kept, records = len(records), records[-arguments.last :]
    output = arguments.output or folder / "trajectories.html"
    output.write_text(html_page(f"Trajectories of {folder.name}", records, kept, *_how_to_show(folder)), "utf-8")
    print(f"{len(records)} of {kept} kept trajectories written to {output}")
    return 0


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


def slow(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print where trajectories spent their time."""
    from rich.console import Console

    from service.trace.slow import print_calls, print_slow

    _, timeline = recorded(arguments.run)
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    if arguments.id is None:
        print_slow(console, timeline, arguments.last)
    else:
        print_calls(console, timeline, arguments.id)
    return 0
