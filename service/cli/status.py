"""`baton status`: finds the run that a user names, and shows its `/status` document, or its summary if the run has
ended. To start fast, it loads neither NumPy nor pydantic."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import urllib.error
import urllib.request
from http.client import HTTPException
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from service.cli.status_view import status_lines
from service.errors import UserError, in_one_line, printable
from service.files import is_locked
from service.observe.status_document import SCHEMA, Status
from service.run.folder import (
    ADDRESS,
    CHECKPOINTS,
    NEWEST_HELP,
    SUMMARY,
    check_begun,
    find_run,
    no_such_run,
    read_address,
    run_folder,
)

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

FETCH_SECONDS = 5.0
"""Maximum seconds to wait for a connection, and for the next bytes of the answer."""
MAX_STATUS_BYTES = 16 << 20

SCHEMES = ("http://", "https://")

DAMAGED = (ValueError, TypeError, KeyError, RecursionError, OSError)
"""Errors that reading a damaged JSON file may raise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", metavar="URL-OR-RUN", nargs="?", help=f"http://host:port, {NEWEST_HELP}")
    parser.add_argument("--json", action="store_true", help="print the /status document; of an ended run its summary")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print the current state of a run, or, if it has ended, its summary."""
    status = run_status(arguments.run or str(run_folder(None)))
    if arguments.json:
        print(json.dumps(status, indent=2))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(printable("\n".join(status_lines(status, width))))
    return 0


def run_status(target: str) -> Status:
    """The status of a run, or `{"folder": ..., "summary": ...}` if it has ended. `UserError` if it does not answer and
    has no summary."""
    folder = find_run(target)
    if folder is None:
        return fetch_status(_address(target))
    check_begun(folder)
    summary = _read_summary(folder)
    try:
        status = fetch_status(_address_in(folder))
        # An address outlives its run, and the next run may listen at the same port.
        served = status["run"].get("folder") if isinstance(status.get("run"), dict) else None
        if not isinstance(served, str) or Path(served) == folder.resolve():
            return status
        raise UserError(f"{folder}: this run does not answer; its address belongs to {served} now")
    except UserError as error:
        if summary is None and (not is_locked(folder) or not (folder / ADDRESS).exists()):
            raise UserError(_no_address(folder)) from error
        if summary is None:
            raise
    return {"folder": str(folder), "summary": summary}


def _address(target: str) -> str:
    """The address of a run, from a URL or `host:port`; raises a `UserError` for any other word."""
    if target.startswith(SCHEMES):
        return target.rstrip("/").removesuffix("/status")
    host, _, port = target.rpartition(":")
    if host and port.isdigit():
        return f"http://{target}"
    raise no_such_run(target, besides="a URL, host:port, ")


def _address_in(folder: Path) -> str:
    try:
        url = read_address(folder)
        if not url.startswith(SCHEMES):
            raise ValueError(f"{url:.200} is no address of a web page")
        return url
    except DAMAGED as error:
        raise UserError(f"{folder / ADDRESS} is damaged: {error!r}") from None


def fetch_status(address: str) -> Status:
    """The status document that a server at `address` serves. `UserError` if no server answers, or its answer is no
    status."""
    try:
        status = json.loads(_fetched(f"{address}/status"))
    except urllib.error.HTTPError as error:
        error.close()
        raise UserError(f"{address}: something answers there, but not with a run's status ({error})") from None
    except (OSError, ValueError, RecursionError, HTTPException) as error:
        reason = in_one_line(str(getattr(error, "reason", error)))[:200]
        raise UserError(
            f"{address}: no run answers there ({reason}); it has ended, has not started yet, or its metrics service "
            "died and is back within seconds"
        ) from None
    if not isinstance(status, dict) or status.get("schema") != SCHEMA:
        raise UserError(f"{address}: something answers there, but not with a run's status of schema {SCHEMA}")
    return status


def _fetched(url: str) -> bytes:
    """The document at `url`; requests to this machine bypass proxies."""
    here = is_loopback(urlsplit(url).hostname or "")
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if here else []))
    with opener.open(url, timeout=FETCH_SECONDS) as answer:
        document: bytes = answer.read(MAX_STATUS_BYTES)
    return document


def is_loopback(host: str) -> bool:
    """Whether a host's name or address always means this machine.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "10.0.0.1", "head")]
    [True, True, True, False, False]
    """
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a run that has ended; None for a running or killed run."""
    file = folder / SUMMARY
    if not file.exists():
        return None
    try:
        summary: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not all(isinstance(text, str) for text in (summary["state"], summary.get("reason", ""))):
            raise TypeError("state or reason is not a text")
        if "reason" not in summary and type(summary["steps"]) is not int:
            raise TypeError("steps is not a number")
    except DAMAGED as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}: {error})") from None
    return summary


def _no_address(folder: Path) -> str:
    """The reason why a run without a summary serves no status."""
    from service.run.checkpoints import Checkpoints

    if is_locked(folder):
        return f"{folder}: the run is starting, and its status is there as soon as its actors are (baton sft has none)"
    newest = f"step {steps[-1]}" if (steps := Checkpoints(folder / CHECKPOINTS, keep=1).steps()) else "none here"
    return (
        f"{folder}: no process of this machine runs it, and it did not say how it ended: it was killed, or runs "
        f"elsewhere; logs/ has what its parts printed, `baton run --resume {folder}` goes on from its newest "
        f"checkpoint ({newest})"
    )
