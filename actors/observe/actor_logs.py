"""Writes each actor's output to `logs/<part>.log` in the run folder, from the actor's construction on."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from actors.watchdog import MARK
from service.environment_variables import LOG_FOLDER
from service.run.records import log_file
from service.run.records.log_file import SUFFIX

log = logging.getLogger(__name__)

START_SECONDS = 60.0


def log_env(folder: Path) -> dict[str, str]:
    """Return the environment variable that tells actors the folder of the logs."""
    return {LOG_FOLDER: f"{folder.stat().st_ino}:{folder}"}


def begin_logs(folder: Path, engines: int, ranks: int) -> None:
    """Create the empty logs of a run's parts, so that they can be followed from the start."""
    numbered = [*(f"generator-{number}" for number in range(engines)), *(f"trainer-{rank}" for rank in range(ranks))]
    for part in ("driver", "metrics-hub", "buffer", *numbered):
        (folder / f"{part}{SUFFIX}").touch()


def shared_logs() -> Path | None:
    """Return the run's folder of logs. None if this process belongs to no run, or its host does not share the
    folder."""
    inode, _, folder = os.environ.get(LOG_FOLDER, "0:").partition(":")
    is_shared = folder and Path(folder).is_dir() and Path(folder).stat().st_ino == int(inode)
    return Path(folder) if is_shared else None


def keep_log(part: str) -> None:
    """Write all output of this process and its children to the part's log, including messages of Python's logging.

    Outside a run, nothing changes. On a host that does not share the run folder, the output stays in Ray's logs.
    """
    if LOG_FOLDER not in os.environ:
        return
    logging.basicConfig(format=log_file.MESSAGE)
    for ours in ("actors", "service"):
        logging.getLogger(ours).setLevel(logging.INFO)
    if (logs := shared_logs()) is None:
        return
    first = f"{part} begins: process {os.getpid()} on {socket.gethostname()}"
    command = [sys.executable, "-I", "-S", log_file.__file__, str(logs / f"{part}{SUFFIX}"), first]
    # With an empty mark, because the watchdog must not end the copying process before the processes that write to it.
    environment = os.environ | {MARK: ""}
    nowhere, (read, write) = subprocess.DEVNULL, os.pipe()
    try:
        streams: dict[str, Any] = {"stdin": read, "stdout": nowhere, "stderr": nowhere}
        subprocess.run(command, check=True, timeout=START_SECONDS, start_new_session=True, env=environment, **streams)
        for output in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(write, output)
    except subprocess.SubprocessError:
        log.warning("%s cannot be written; the output of %s stays in this file of Ray", command[-2], part)
    finally:
        os.close(read)
        os.close(write)
