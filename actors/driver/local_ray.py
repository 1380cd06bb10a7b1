"""Starts a Ray on this machine for one run or evaluation, and retries if it does not come up."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import ray

from actors.calls import in_a_line
from actors.watchdog import end_processes
from service.errors import RunFailed
from service.run.phases import say

START_TRIES = 3
"""Ray's raylet ends if one of its agents is not up within 15 s, a bound that no setting changes
(https://github.com/ray-project/ray/issues/65983). On a busy machine the next start is faster: the files are cached."""
RAYLET_ERRORS = "raylet.err"

_CHECK_FAILED = re.compile(r"Check failed: .*")


def start_local_ray(mark: str, folder: Path, logs: Path | None, **settings: Any) -> None:
    """Start a Ray that keeps its files in `folder`, with these settings of `ray.init`.

    If a raylet ended, its error log is copied to `logs`.

    Raises:
        RunFailed: Ray has not started in any of `START_TRIES` tries; the message says why.
    """
    for number in range(1, START_TRIES + 1):
        try:
            ray.init(address="local", include_dashboard=False, _temp_dir=str(folder), **settings)
            return
        except Exception as error:
            if not is_failed_start(error):
                raise
            reason = f"Ray did not start: {in_a_line(error)}{_why(folder, logs)}"
            if number == START_TRIES:
                raise RunFailed(reason) from error
        say(f"{reason}; starting it again, try {number + 1} of {START_TRIES} ...")
        end_processes(mark, set())


def is_failed_start(error: Exception) -> bool:
    """Whether `ray.init` failed for Ray's own reasons; Ray raises a bare Exception if it is not up in time."""
    return isinstance(error, RuntimeError | ConnectionError) or type(error) is Exception


def _why(folder: Path, logs: Path | None) -> str:
    """Return which check ended the raylet, for a message; the raylet's error log is copied to `logs`."""
    file = folder / "session_latest" / "logs" / RAYLET_ERRORS
    if not file.is_file() or not (found := _CHECK_FAILED.search(file.read_text(errors="replace"))):
        return ""
    if logs is not None:
        shutil.copyfile(file, logs / RAYLET_ERRORS)
    return f" Its raylet ended: {found[0]}" + ("" if logs is None else f" (more in {logs / RAYLET_ERRORS})")
