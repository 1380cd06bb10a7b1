"""`baton init`: creates a folder with a configuration, an environment, its test and a dataset, to start a new task."""

from __future__ import annotations

import argparse
import re
from importlib import resources
from itertools import count
from pathlib import Path

from service.errors import UserError
from service.files import resolved

ABOUT = """\
Write a folder to begin a task of your own: a configuration that trains a small model on two CPU cores in minutes, an
environment, a dataset, a test of the environment, and a README that says what to change.
"""

EXAMPLES = """\
examples:
  baton init my-task
  cd my-task
  python -m pytest                       # the environment alone (pip install pytest)
  baton run --config config.yaml

The name is that of the folder and of the run. An existing folder is taken only while it is empty.
"""

PLACEHOLDER = "NAME"
"""The word that stands for the task's name in the copied files."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Matches a valid name of a task, which is also valid as `run.name`."""

SUFFIXES = (".ini", ".jsonl", ".md", ".py", ".yaml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `baton init`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder; its last part is the task's name")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Write the folder and print the next steps."""
    folder: Path = arguments.folder
    print(f"{folder}: {', '.join(write_task(folder))}")
    print(f"next:\n  cd {folder}\n  python -m pytest   # after: pip install pytest\n  baton run --config config.yaml")
    return 0


def write_task(folder: Path) -> list[str]:
    """Write the files of a new task; returns their names. `UserError` if the name is not valid for a run, or the folder
    not empty."""
    if folder.name in ("", ".."):  # `.` and `..` are not the folder's name
        folder = resolved(folder)
    name = resolved(folder).name
    if not NAME.fullmatch(name):
        nearest = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-_") or "my-task"
        raise UserError(
            f"{name!r:.80} cannot be the name of a task: letters, digits, `.`, `_` and `-`, the first a letter or a "
            f"digit; for example {folder.parent / nearest}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        taken = "is not empty" if folder.is_dir() else "is a file"
        numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
        free = next(other for other in numbered if not other.exists())
        raise UserError(f"{folder} {taken}; give the name of a new folder, for example {free}")
    folder.mkdir(parents=True, exist_ok=True)
    template = Path(str(resources.files("baton.examples") / "new_task"))
    sources = sorted(path for path in template.iterdir() if path.suffix in SUFFIXES)
    for source in sources:
        (folder / source.name).write_text(source.read_text("utf-8").replace(PLACEHOLDER, name), "utf-8")
    (folder / ".gitignore").write_text("runs/\nmodels/\n", "utf-8")  # not uploaded by Ray with a job's folder
    return [".gitignore", *(source.name for source in sources)]
