"""`baton trace`: joins the files of a run's timeline into one file for ui.perfetto.dev."""

from __future__ import annotations

import argparse
from pathlib import Path

from service.files import output_file
from service.run.folder import NEWEST_HELP

ABOUT = """\
Write the timeline of a run that goes on, has ended or was killed: what every engine and every rank did when, and for
what it waited; the buffer's groups; checkpoints and evaluations; a sample of trajectories with their turns and tool
calls. Open the file in https://ui.perfetto.dev or chrome://tracing. It contains no text of prompts or responses.
"""
EXAMPLES = """\
examples:
  baton trace                                            # the newest run in runs/: trace.json in its folder
  baton trace quickstart --output quickstart.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `baton trace`."""
    parser.add_argument("run", metavar="RUN", nargs="?", help=NEWEST_HELP)
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: trace.json in the run folder")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Write the trace file, one event per line."""
    from service.run.folder import run_folder
    from service.run.records.timeline import timeline_events

    if arguments.output is not None:
        from service.config.paths import check_output

        check_output(arguments.output)
    folder = run_folder(arguments.run)
    output = arguments.output or folder / "trace.json"
    with output_file(output) as partial, partial.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        count = -1
        for count, event in enumerate(timeline_events(folder)):
            file.write((b",\n" if count else b"\n") + event)
        file.write(b"\n]}\n")
    print(f"{count + 1} events written to {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0
