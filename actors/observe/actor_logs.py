"""Writes each actor's output to `logs/<part>.log` in the run folder, from the actor's construction on."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from actors.watchdog import MARK
from service.environment_variables import LOG_FOLDER
from service.run import log_file
from service.run.log_file import SUFFIX

log = logging.getLogger(__name__)

START_SECONDS = 60.0


def log_env(folder: Path) -> dict[str, str]:
    """Return the environment variable that tells actors the folder of the logs."""
    return {LOG_FOLDER: f"{folder.stat().st_ino}:{folder}"}


def parts(engines: int, ranks: int) -> list[str]:
    """Return the names of a run's parts, each of which has a log."""
    generators = [f"generator-{number}" for number in range(engines)]
    trainers = [f"trainer-{rank}" for rank in range(ranks)]
    return ["driver", "metrics-hub", "buffer", *generators, *trainers]


def begin_logs(parts: Sequence[str], folder: Path) -> None:
    """Create the empty logs of a run before its actors start."""
    for part in parts:
        (folder / f"{part}{SUFFIX}").touch()


def say_which_are_elsewhere(parts: Sequence[str], folder: Path, say: Callable[[str], None]) -> None:
    """For each log that is still empty after all actors were constructed, write a line to the terminal and into the
    log. The line says where the output is instead."""
    for part in parts:
        file = folder / f"{part}{SUFFIX}"
        if file.exists() and not file.stat().st_size:
            where = (
                f"the log of {part} is on its host, which does not share the run folder, as {elsewhere(folder, part)} "
                "among Ray's logs; `ray logs` and Ray's dashboard show it"
            )
            say(where)
            file.write_text(f"{where}\n")


def keep_log(part: str) -> None:
    """Write all output of this process and its children to the part's log, including messages of Python's logging.

    Outside a run, nothing changes. On a host that does not share the run folder, the log is in the folder of Ray's own
    logs.
    """
    if (told := os.environ.get(LOG_FOLDER)) is None:
        return
    first = f"{part} begins: process {os.getpid()} on {socket.gethostname()}"
    command = [sys.executable, "-I", "-S", log_file.__file__, str(_file(told, part)), first]
    read, write = os.pipe()
    # Without the mark, because the watchdog must not end the copying process before the processes that write to it.
    environment = {key: value for key, value in os.environ.items() if key != MARK}
    try:
        nowhere = subprocess.DEVNULL
        subprocess.run(
            command,
            check=True,
            timeout=START_SECONDS,
            start_new_session=True,
            env=environment,
            stdin=read,
            stdout=nowhere,
            stderr=nowhere,
        )
        for output in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(write, output)
    except subprocess.SubprocessError:
        log.warning("%s cannot be written; the output of %s stays in this file of Ray", command[-2], part)
    finally:
        os.close(read)
        os.close(write)
    logging.basicConfig(format=log_file.MESSAGE)
    for ours in ("actors", "service"):
        logging.getLogger(ours).setLevel(logging.INFO)


def _file(told: str, part: str) -> Path:
    """Return the log in the run folder if this host shares that folder, else one in the folder of Ray's logs."""
    inode, _, path = told.partition(":")
    folder = Path(path)
    if folder.is_dir() and folder.stat().st_ino == int(inode):
        return folder / f"{part}{SUFFIX}"
    output = Path(f"/proc/self/fd/{sys.stdout.fileno()}").readlink()
    # One of Ray's settings makes the output a pipe.
    logs = output.parent if output.is_absolute() else Path(tempfile.gettempdir())
    return logs / elsewhere(folder, part)


def elsewhere(folder: Path, part: str) -> str:
    """Return the name of a part's log if the log is in the folder of Ray's own logs.

    >>> elsewhere(Path("runs/quickstart/logs"), "buffer")
    'baton-quickstart-buffer.log'
    """
    return f"baton-{folder.parent.name}-{part}{SUFFIX}"
