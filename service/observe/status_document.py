"""The `/status` document, which the metrics hub joins from the reports of the run's parts.

{"schema": 1, "run": {"name": "quickstart", "max_steps": 100, "started": 1764.2, "stepped": 1790.1},
 "state": "training", "policy_version": {"incarnation": 1, "step": 37}, "time": 1790.5,
 "buffer": {"groups": {"open": 32, "complete": 5, ...}, ...}, "tokens": {"trained": 51200, "open": 800, ...},
 "waits": [{"who": "trainer", "reason": "groups", "detail": "11 of 16", "since": 1790.1}],
 "actors": [{"role": "trainer", "ident": "trainer-0", "host": "10.0.0.7", "state": "up", "age_seconds": 0.4,
             "leaked_tasks": 0}],
 "step": {"reward/avg_raw_reward": 0.61, "generate/batch_padded_seq_len": 57}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # `baton status` does not load pydantic or NumPy
    from service.handoff.verbs import BufferStatus

SCHEMA = 1

PARTS = ("run", "buffer", "step")
"""The reports that make up the status: the driver's about the `run`, the `buffer`'s, and the driver's about the newest
optimizer `step`."""

Status = dict[str, Any]


class Uploaded(NamedTuple):
    """State of the uploads to the object store."""

    step: int | None
    """The newest checkpoint in the store; None: there is none."""
    bytes: int
    """Number of bytes uploaded so far."""
    failures: int
    """Number of attempts that have failed so far."""
    failing: str
    """Why the newest attempt failed; empty while uploads succeed."""


def buffer_report(status: BufferStatus, now: float) -> dict[str, Any]:
    """The report of the buffer for the status document. Each entry of `waits` says who waits, why, and since which Unix
    time."""
    report = status.as_dict()
    report["waits"] = [
        {
            "who": wait.who.removeprefix("generator "),  # the names of generators begin with `generator-`
            "reason": str(wait.reason),
            "detail": wait.detail,
            "since": now - wait.seconds,
        }
        for wait in status.waits
    ]
    return report


def status_document(parts: Mapping[str, Mapping[str, Any]], actors: list[dict[str, Any]], now: float) -> Status:
    """The document `/status`, from the last report of each part of the run. A part without a report is empty."""
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
