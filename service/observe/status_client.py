"""Finds the run that a user names, and reads its `/status` document or, if the run has ended, its summary."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from service.errors import UserError
from service.files import is_locked
from service.observe.status import SCHEMA, Status
from service.run.folder import ADDRESS, RUNS, SUMMARY, find_run, no_such_run

FETCH_SECONDS = 5.0
MAX_STATUS_BYTES = 16 << 20

DAMAGED = (ValueError, TypeError, KeyError, RecursionError, OSError)
"""The errors of reading a damaged JSON file."""


def run_status(target: str, runs: Path = RUNS) -> Status:
    """The status of a running run, or `{"folder": ..., "summary": ...}` of a run folder whose run has ended.

    Raises:
        UserError: the run does not answer, and no summary says how it ended.
    """
    folder = find_run(target, runs)
    summary = None if folder is None else _read_summary(folder)
    try:
        status = fetch_status(status_address(target, runs))
    except UserError as error:
        if summary is not None:
            return {"folder": str(folder), "summary": summary}
        if folder is not None and not is_locked(folder):
            raise UserError(_no_address(folder)) from error
        raise
    # An address outlives its run, and the next run may listen at the same port.
    served = status["run"].get("folder")
    if folder is None or served is None or Path(served) == folder.resolve():
        return status
    if summary is None:
        raise UserError(f"{folder}: this run does not answer; at its address answers {served}")
    return {"folder": str(folder), "summary": summary}


def status_address(target: str, runs: Path = RUNS) -> str:
    """The address behind a URL, `host:port`, a run folder or a run's name.

    Raises:
        UserError: there is no such run, or it has no address.
    """
    if target.startswith(("http://", "https://")):
        return target.rstrip("/").removesuffix("/status")
    if (folder := find_run(target, runs)) is not None:
        if not (folder / ADDRESS).exists():
            raise UserError(_no_address(folder))
        try:
            return str(json.loads((folder / ADDRESS).read_text(encoding="utf-8"))["url"])
        except DAMAGED as error:
            raise UserError(f"{folder / ADDRESS} is damaged: {error!r}") from None
    host, _, port = target.rpartition(":")
    if host and port.isdigit():
        return f"http://{target}"
    raise no_such_run(target, runs, besides="a URL, host:port, ")


def fetch_status(address: str) -> Status:
    """The document served at `address`.

    Raises:
        UserError: no server answers there, or the answer is not a status document.
    """
    try:
        with urllib.request.urlopen(f"{address}/status", timeout=FETCH_SECONDS) as answer:
            status = json.loads(answer.read(MAX_STATUS_BYTES))
    except urllib.error.HTTPError as error:
        raise UserError(f"{address}: something answers there, but not with a run's status ({error})") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"{address}: no run answers there ({reason}); it has ended, has not started yet, or its metrics service "
            "died and is back within seconds"
        ) from None
    if not isinstance(status, dict) or status.get("schema") != SCHEMA:
        raise UserError(f"{address}: something answers there, but not with a run's status of schema {SCHEMA}")
    return status


def _read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a run that has ended; None for a running or killed run."""
    file = folder / SUMMARY
    if not file.exists():
        return None
    try:
        summary: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        summary["state"]
    except DAMAGED as error:
        raise UserError(f"{file} is damaged: {error!r}") from None
    return summary


def _no_address(folder: Path) -> str:
    """Why a run without a summary serves no status."""
    if is_locked(folder):
        return f"{folder}: the run is starting; its status is there as soon as its actors are"
    return (
        f"{folder}: no process of this machine runs it, and it did not say how it ended: it was killed, or runs "
        f"elsewhere; logs/ has what its parts printed, `baton run --resume {folder}` goes on from its newest "
        "checkpoint"
    )
