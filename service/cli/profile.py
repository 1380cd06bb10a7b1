"""`baton profile`: records torch profiles of the next optimizer steps of a running run."""

from __future__ import annotations

import argparse
import time

from service.run.arguments import NEWEST_HELP, count
from service.run.folder import run_folder
from service.run.profiles import MAX_STEPS, ask

WAIT_SECONDS = 600.0

ABOUT = """\
Record a torch profile of the next optimizer steps of a run, which goes on meanwhile. There is a file for each rank, in
the folder `profiles` of the run folder; open it in https://ui.perfetto.dev.
"""
EXAMPLES = """\
examples:
  baton profile                                          # one step of trainer-0 of the newest run in runs/
  baton profile quickstart --steps 3 --ranks 0,1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `baton profile`."""
    parser.add_argument("run", metavar="RUN", nargs="?", help=NEWEST_HELP)
    parser.add_argument("--steps", type=count, default=1, metavar="N", help=f"at most {MAX_STEPS} (default 1)")
    parser.add_argument("--ranks", type=numbers, default=(0,), metavar="N,N", help="ranks of the trainer (default 0)")
    text = f"seconds to wait for the steps (default {WAIT_SECONDS:.0f})"
    parser.add_argument("--wait", type=count, default=WAIT_SECONDS, metavar="SECONDS", help=text)


def numbers(text: str) -> tuple[int, ...]:
    """Parse distinct numbers of at least 0: `0,2` -> (0, 2).

    Raises:
        ValueError: the text is something else.
    """
    found = tuple(dict.fromkeys(int(word) for word in text.split(",")))
    if min(found) < 0:
        raise ValueError(text)
    return found


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Request the profiles from the run, and print their files."""
    for file in ask(run_folder(arguments.run), arguments.steps, arguments.ranks, arguments.wait, time.sleep):
        print(f"{file} ({file.stat().st_size / 1e6:.1f} MB)")
    return 0
