"""`baton logs`: prints the output of the parts of a run, from `logs/<part>.log` of the run folder."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from service.errors import UserError, printable
from service.run.folder import LOGS, NEWEST_HELP, SUMMARY, count, refuse_larger, run_folder
from service.run.records.log_file import LOG_BYTES, SUFFIX

ABOUT = """\
Print the newest lines of a run's logs in the order of their times. With --follow, print them part by part, then new
lines until Ctrl-C. The parts are the driver, the metrics-hub, the buffer, and every generator
(generator-0, ...) and trainer rank (trainer-0, ...). The files are plain text: logs/PART.log in a run.
"""

EXAMPLES = """\
examples:
  baton logs                                             # the newest lines of all parts of the newest run
  baton logs runs/quickstart generator-0 --follow
  baton logs runs/quickstart trainer-0 --last 1000
"""

HEADING = re.compile(r"==> (.+)\.log <==\n")
"""Matches the heading that `tail` prints before lines of another file. (A log's own lines begin with a time.)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", metavar="RUN", nargs="?", help=NEWEST_HELP)
    parser.add_argument("part", metavar="PART", nargs="?", help="such as generator-0 (default: all parts)")
    parser.add_argument("--last", type=count, default=50, metavar="N", help="the newest N lines (default 50)")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until Ctrl-C")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print the newest lines; with --follow, also new lines as they are written."""
    folder = run_folder(arguments.run)
    files, ended = _files(folder / LOGS, arguments.part), (folder / SUMMARY).exists()
    lines = (_coming if arguments.follow and not ended else _newest)(files, arguments.last)
    width = max(len(file.stem) for file in files)
    for part, line in lines:
        print(printable(f"{part:{width}} {line}"), flush=True)
    if arguments.follow and ended:
        print("the run has ended: no more lines will come")
    return 0


def _files(folder: Path, part: str | None) -> list[Path]:
    """The log file of a part, or all log files; raises a `UserError` if there is no such file."""
    files = sorted(file for file in folder.glob(f"*{SUFFIX}") if file.is_file())
    chosen = [file for file in files if part in (None, file.stem)]
    if chosen:
        refuse_larger(chosen, 2 * LOG_BYTES * len(chosen))
        return chosen
    there = ", ".join(file.stem for file in files)
    raise UserError(f"{part}: no part of this run; it has {there}" if files else f"{folder}: there are no logs")


def _newest(files: list[Path], last: int) -> Iterable[tuple[str, str]]:
    """The newest lines of all files as (part, line), sorted by time."""
    found: list[tuple[str, str]] = []
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as lines:
            found += [(file.stem, line.rstrip("\n")) for line in deque(lines, last)]
    return deque(sorted(found, key=lambda line: line[1].split(" ")[0]), last)


def _coming(files: list[Path], last: int) -> Iterator[tuple[str, str]]:
    """Each file's newest lines, then new lines as they are written, as (part, line), until Ctrl-C. `tail` continues
    when a log is renamed and replaced, and ends with this process."""
    names = [file.name for file in files]
    command = ["tail", f"--pid={os.getpid()}", "--verbose", f"--lines={last}", "--follow=name", "--retry", *names]
    part = ""
    with subprocess.Popen(
        command,
        cwd=files[0].parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        errors="replace",
    ) as tail:
        try:
            for line in tail.stdout or ():
                if heading := HEADING.fullmatch(line):
                    part = heading[1]
                elif line != "\n":
                    yield part, line.rstrip("\n")
        finally:
            tail.terminate()
