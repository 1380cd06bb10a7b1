"""`baton status`, which is typed often and loads neither NumPy nor pydantic."""

from __future__ import annotations

import argparse
import json
import shutil
import sys

from service.errors import printable
from service.run.arguments import NEWEST_HELP

ABOUT = """\
Show a run's rates, its groups by state, its tokens by fate, and which actor waits for what; of a run that has ended,
its summary. The run serves the same as JSON at /status, with live charts at /, and for Prometheus at /metrics.
"""
EXAMPLES = """\
examples:
  baton status                           # the newest run in runs/
  baton status quickstart                # the run of that name
  baton status runs/quickstart-2
  baton status 127.0.0.1:9400 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", metavar="URL-OR-RUN", nargs="?", help=f"http://host:port, {NEWEST_HELP}")
    parser.add_argument("--json", action="store_true", help="print the /status document")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print what a run is doing now, or how it ended."""
    from service.cli.status_client import run_status
    from service.cli.status_view import status_lines
    from service.run.folder import run_folder

    status = run_status(arguments.run or str(run_folder(None)))
    if arguments.json:
        print(json.dumps(status, indent=2))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(printable("\n".join(status_lines(status, width))))
    return 0
