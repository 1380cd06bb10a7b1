"""`baton scale`: asks a run to change its number of generators."""

from __future__ import annotations

import argparse

from service.run.arguments import RUN_HELP, count

ABOUT = """\
Ask a running run for more or fewer generators.

The run's configuration gives the bounds (generator.engines: {min: 1, max: 8}). One that joins takes the newest weights
and claims; one that leaves plays on for generator.leave_grace seconds, hands over what is open, and ends.
"""
EXAMPLES = """\
examples:
  baton scale runs/mine --engines 3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--engines", type=count, metavar="N", required=True, help="how many, all together")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Ask a run to change its number of generators."""
    from service.config import load
    from service.run.folder import CONFIG, run_folder
    from service.run.scale_request import ask_for

    folder = run_folder(arguments.run)
    ask_for(folder, load([folder / CONFIG], []).config.generator, arguments.engines)
    generators = "1 generator" if arguments.engines == 1 else f"{arguments.engines} generators"
    print(f"{folder} is asked for {generators}: see baton status {folder}, and baton logs {folder} driver")
    return 0
