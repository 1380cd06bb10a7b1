"""`baton trace`: writes a run's timeline for ui.perfetto.dev."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from service.files import atomic_file
from service.run.arguments import NEWEST_HELP

if TYPE_CHECKING:
    from service.run.timeline import RunTimeline

ABOUT = """\
Write the timeline of a run that goes on, has ended or was killed: what every engine and every rank did when, and for
what it waited; the buffer's groups; checkpoints and evaluations; a sample of trajectories with their turns and tool
calls. Open the file in https://ui.perfetto.dev or chrome://tracing. It contains no text of prompts or responses.
"""
EXAMPLES = """\
examples:
  baton trace                                            # the newest run in runs/: trace.json in its folder
  baton trace quickstart --output quickstart.json
  baton trace runs/long --last 10                        # its last ten minutes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `baton trace`."""
    parser.add_argument("run", metavar="RUN", nargs="?", help=NEWEST_HELP)
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: trace.json in the run folder")
    parser.add_argument("--last", type=minutes, metavar="MINUTES", help="leave out what ended earlier")


def minutes(text: str) -> float:
    """Parse a number of minutes above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Write the trace file, one event per line."""
    from service.trace.chrome import chrome_trace, trace_lines

    if arguments.output is not None:
        from service.config.paths import check_output

        check_output(arguments.output)
    folder, timeline = recorded(arguments.run)
    if arguments.last is not None:
        timeline.since(timeline.ended - 60 * arguments.last)
    output = arguments.output or folder / "trace.json"
    found = chrome_trace(timeline)
    with atomic_file(output) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(trace_lines(found))
    print(f"{len(found['traceEvents'])} events written to {output} ({output.stat().st_size / 1e6:.1f} MB)")
    print(f"trajectories: {found['otherData']['trajectories']}")
    return 0


def recorded(run: str | None) -> tuple[Path, RunTimeline]:
    """The folder and the timeline of a run; of the newest run if `run` is None.

    Raises:
        UserError: there is no such run, or it kept no timeline.
    """
    from service.run.folder import run_folder
    from service.run.timeline import read_timeline

    folder = run_folder(run)
    return folder, read_timeline(folder)
