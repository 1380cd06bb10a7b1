"""The `/status` document: what a run is doing now, as JSON and as lines for a terminal.

{"schema": 1, "run": {"name": "quickstart", "max_steps": 100, "started": 1764.2},
 "state": "training", "policy_version": {"epoch": 1, "step": 37}, "time": 1790.5,
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

if TYPE_CHECKING:
    from service.handoff.status import BufferStatus

SCHEMA = 1
FETCH_SECONDS = 5.0
MAX_STATUS_BYTES = 16 << 20

Status = dict[str, Any]


def compose(parts: Mapping[str, Mapping[str, Any]], actors: list[dict[str, Any]], now: float) -> Status:
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
        "policy_version": version or {"epoch": 0, "step": 0},
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
        {"who": wait.who, "reason": str(wait.reason), "detail": wait.detail, "since": now - wait.seconds}
        for wait in status.waits
    ]
    return report


def status_address(target: str, runs: Path = Path("runs")) -> str:
    """The address behind a URL, `host:port`, a run folder or a run's name.

    Raises:
        UserError: nothing of that name, or a run that has no address.
    """
    if target.startswith(("http://", "https://")):
        return target.rstrip("/").removesuffix("/status")
    for folder in (Path(target), runs / target):
        file = folder / "address.json"
        if file.is_file():
            address: str = json.loads(file.read_text(encoding="utf-8"))["url"]
            return address
        if (folder / "config.yaml").is_file():
            raise UserError(f"{folder}: this run is still starting, or ended before it served its status")
    host, _, port = target.rpartition(":")
    if host and port.isdigit():
        return f"http://{target}"
    raise UserError(f"{target}: neither a URL, host:port, a run folder nor the name of a run in {runs}/")


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
        raise UserError(f"{address}: no run answers there ({reason}); it has ended, or has not started yet") from None
    if not isinstance(status, dict) or status.get("schema") != SCHEMA:
        raise UserError(f"{address}: something answers there, but not with a run's status of schema {SCHEMA}")
    return status
