"""The `/status` document: what a run is doing now, as JSON and as lines for a terminal.

{"schema": 1, "run": {"name": "quickstart", "max_steps": 100, "started": 1764.2, "stepped": 1790.1},
 "state": "training", "policy_version": {"incarnation": 1, "step": 37}, "time": 1790.5,
 "buffer": {"groups": {"open": 32, "complete": 5, ...}, ...}, "tokens": {"trained": 51200, "open": 800, ...},
 "waits": [{"who": "trainer", "reason": "groups", "detail": "11 of 16", "since": 1790.1}],
 "actors": [{"role": "trainer", "ident": "trainer-0", "state": "up", "age_seconds": 0.4}],
 "step": {"reward/avg_raw_reward": 0.61, "generate/batch_padded_seq_len": 57}}
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.clock import Clock, SystemClock
from service.errors import UserError
from service.run.folder import ADDRESS, RUNS, SUMMARY, find_run, is_running, no_such_run

if TYPE_CHECKING:
    from service.handoff.status import BufferStatus

SCHEMA = 1
FETCH_SECONDS = 5.0
MAX_STATUS_BYTES = 16 << 20

BROKEN = (ValueError, TypeError, KeyError, RecursionError, OSError)
"""What reading a damaged file of JSON raises."""

Status = dict[str, Any]


def status_document(parts: Mapping[str, Mapping[str, Any]], actors: list[dict[str, Any]], now: float) -> Status:
    """The document from what the parts of the run reported last; a part that has not reported is empty."""
    run = dict(parts.get("run", {}))
    buffer = dict(parts.get("buffer", {}))
    state = run.pop("state", "starting")
    version = run.pop("policy_version", None)
    buffer.pop("policy_version", None)
    return {
        "schema": SCHEMA,
        "time": now,
        "run": run,
        "state": state,
        "policy_version": version or {"incarnation": 0, "step": 0},
        "tokens": buffer.pop("tokens", {}),
        "waits": buffer.pop("waits", []),
        "buffer": buffer,
        "actors": actors,
        "step": dict(parts.get("step", {})),
    }


def buffer_status(status: BufferStatus, clock: Clock | None = None) -> dict[str, Any]:
    """The buffer's part, with the Unix time since when somebody waits."""
    now = (clock or SystemClock()).wall()
    report = status.as_dict()
    report["waits"] = [
        # Generators are named generator-0, -1, ...: that they are generators need not be said again.
        {
            "who": wait.who.removeprefix("generator "),
            "reason": str(wait.reason),
            "detail": wait.detail,
            "since": now - wait.seconds,
        }
        for wait in status.waits
    ]
    return report


def status_address(target: str, runs: Path = RUNS) -> str:
    """The address behind a URL, `host:port`, a run folder or a run's name.

    Raises:
        UserError: nothing of that name, or a run that has no address.
    """
    if target.startswith(("http://", "https://")):
        return target.rstrip("/").removesuffix("/status")
    if (folder := find_run(target, runs)) is not None:
        try:
            address: str = json.loads((folder / ADDRESS).read_text(encoding="utf-8"))["url"]
        except FileNotFoundError:
            raise UserError(_unserved(folder)) from None
        except BROKEN as error:
            raise UserError(f"{folder / ADDRESS} is damaged: {error!r}") from None
        return address
    host, _, port = target.rpartition(":")
    if host and port.isdigit():
        return f"http://{target}"
    raise no_such_run(target, runs, besides="a URL, host:port, ")


def summary_of(folder: Path) -> dict[str, Any] | None:
    """How the run of a folder ended; None while it goes on, and where it was killed."""
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        summary["state"]
    except FileNotFoundError:
        return None
    except BROKEN as error:
        raise UserError(f"{folder / SUMMARY} is damaged: {error!r}") from None
    return summary


def _unserved(folder: Path) -> str:
    """Why a run that has left no summary serves no status."""
    if is_running(folder):
        return f"{folder}: the run is starting; its status is there as soon as its actors are"
    return (
        f"{folder}: no process of this machine runs it, and it did not say how it ended: it was killed, or runs "
        f"elsewhere; logs/ has what its processes printed, `baton run --resume {folder}` goes on from its newest "
        "checkpoint"
    )


def run_status(target: str, runs: Path = RUNS) -> Status:
    """What the run does now; of a run folder whose run has ended, how it ended, under `summary`.

    Raises:
        UserError: nobody answers, and nothing says how the run ended.
    """
    folder = find_run(target, runs)
    summary = None if folder is None else summary_of(folder)
    try:
        status = fetch_status(status_address(target, runs))
    except UserError as error:
        if folder is None:
            raise
        if summary is not None:
            return {"folder": str(folder), "summary": summary}
        if not is_running(folder):
            raise UserError(_unserved(folder)) from error
        raise
    # An address outlives its run, and the next one may have taken the port.
    served = status["run"].get("folder")
    if folder is None or served is None or Path(served) == folder.resolve():
        return status
    if summary is None:
        raise UserError(f"{folder}: this run does not answer; at its address answers {served}")
    return {"folder": str(folder), "summary": summary}


def fetch_status(address: str) -> Status:
    """The document served at `address`.

    Raises:
        UserError: nobody answers there, or something else than Baton does.
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
