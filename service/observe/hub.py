"""The metrics hub without Ray or HTTP: takes every actor's numbers, gives one page of metrics and one status."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.clock import Clock
from service.observe.metrics_table import BY_NAME, TABLE
from service.observe.status import Status, compose

SILENT_SECONDS = 10.0
"""An actor that has pushed nothing for this long counts as down; its gauges are no longer served."""

RATE_REPORTS = 10
"""Reports of the buffer, one a second, over which its rate is taken."""

HISTORY_STEPS = 5000
"""Optimizer steps that the status page can look back on."""

HISTORY_KEYS = (
    "reward/avg_raw_reward",
    "generate/batch_padded_seq_len",
    "generate/avg_num_tokens",
    "async/staleness_mean",
    "async/staleness_max",
    "timing/step",
    "timing/wait_for_generation_buffer",
)

MAX_SNAPSHOT_BYTES = 4 << 20

MAX_SOURCES = 4096
"""Actors, and parts of the status, that the hub keeps; a sender that makes up names does not fill its memory."""

_SOURCE = re.compile(r"[\w.-]{1,64}(/[\w.-]{1,64})?", re.ASCII)

_HEADER = re.compile(rb"^# HELP (\w+) .*\n# TYPE \w+ \w+\n", re.MULTILINE)


@dataclass(frozen=True)
class _Pushed:
    """What one actor pushed last: per family its lines of samples."""

    role: str
    ident: str
    at: float
    samples: dict[str, bytes]


class Hub:
    """Keeps the last snapshot of every source and the last report of every part of the run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sources: dict[str, _Pushed] = {}
        self._parts: dict[str, dict[str, Any]] = {}
        self._accepted: deque[tuple[float, float]] = deque(maxlen=RATE_REPORTS)
        self._steps: deque[dict[str, Any]] = deque(maxlen=HISTORY_STEPS)

    def push(self, source: str, snapshot: bytes) -> None:
        """Take the numbers of `role/ident`, in place of those it pushed before."""
        _check_name(source, self._sources)
        role, _, ident = source.partition("/")
        self._sources[source] = _Pushed(role, ident or role, self._clock.monotonic(), _families(snapshot))

    def forget(self, source: str) -> None:
        """The source is gone for good, on purpose."""
        self._sources.pop(source, None)
        self._parts.pop(source, None)

    def put_status(self, part: str, report: Mapping[str, Any]) -> None:
        """Take the report of a part: `run`, `buffer`, `step`, or an actor's `role/ident`."""
        _check_name(part, self._parts)
        self._parts[part] = dict(report)
        if part == "buffer" and "accepted_tokens" in report:
            self._accepted.append((self._clock.monotonic(), report["accepted_tokens"]))
            self._parts[part]["tokens_per_second"] = self._tokens_per_second()
        if part == "step" and "trainer/global_step" in report:
            while self._steps and self._steps[-1]["trainer/global_step"] >= report["trainer/global_step"]:
                self._steps.pop()  # a trainer that went back to a checkpoint takes these steps again
            self._steps.append(self._parts[part])

    def _tokens_per_second(self) -> float:
        (start, before), (now, accepted) = self._accepted[0], self._accepted[-1]
        return max(0.0, accepted - before) / (now - start) if now > start else 0.0

    def page(self) -> bytes:
        """Everything as Prometheus text; families in the order of the table."""
        now = self._clock.monotonic()
        blocks: list[bytes] = []
        for metric in TABLE:
            lines = [
                pushed.samples[metric.name]
                for pushed in self._sources.values()
                if metric.name in pushed.samples and (metric.kind != "gauge" or _is_up(pushed, now))
            ]
            if metric.name == "baton_actor_up":
                lines = [_sample(metric.name, p, float(_is_up(p, now))) for p in self._sources.values()]
            elif metric.name == "baton_actor_age_seconds":
                lines = [_sample(metric.name, p, now - p.at) for p in self._sources.values()]
            if lines:
                blocks.append(f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n".encode())
                blocks.extend(lines)
        return b"".join(blocks)

    def status(self) -> Status:
        """The `/status` document."""
        now = self._clock.monotonic()
        actors = [
            {
                "role": pushed.role,
                "ident": pushed.ident,
                "state": "up" if _is_up(pushed, now) else "silent",
                "age_seconds": round(now - pushed.at, 3),
                **self._parts.get(source, {}),
            }
            for source, pushed in sorted(self._sources.items())
        ]
        return compose(self._parts, actors, self._clock.wall())

    def history(self, after: int) -> dict[str, Any]:
        """The steps after `after` as columns, for charts."""
        steps = [step for step in self._steps if step["trainer/global_step"] > after]
        return {
            "steps": [step["trainer/global_step"] for step in steps],
            "columns": {key: [_finite(step.get(key)) for step in steps] for key in HISTORY_KEYS},
        }

    def silent(self) -> list[str]:
        """The sources that have pushed nothing for too long."""
        now = self._clock.monotonic()
        return sorted(source for source, pushed in self._sources.items() if not _is_up(pushed, now))


def _check_name(name: str, known: Mapping[str, object]) -> None:
    """The name becomes a label, and an entry that stays: it is short and plain, and there are not too many."""
    if not _SOURCE.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is no name of an actor")
    if name not in known and len(known) >= MAX_SOURCES:
        raise ValueError(f"{MAX_SOURCES} names are known already; {name} is one too many")


def _families(snapshot: bytes) -> dict[str, bytes]:
    """Family name -> its lines of samples; a family that the table does not have is a bug of the sender."""
    if len(snapshot) > MAX_SNAPSHOT_BYTES:
        raise ValueError(f"a snapshot of {len(snapshot)} bytes")
    headers = list(_HEADER.finditer(snapshot))
    ends = [header.start() for header in headers[1:]] + [len(snapshot)] * bool(headers)
    families = {header[1].decode(): snapshot[header.end() : end] for header, end in zip(headers, ends, strict=True)}
    if unknown := families.keys() - BY_NAME.keys():
        raise ValueError(f"not in the table of metrics: {sorted(unknown)}")
    return families


def _finite(value: float | None) -> float | None:
    """JSON has no NaN; browsers refuse it."""
    return value if value is not None and math.isfinite(value) else None


def _is_up(pushed: _Pushed, now: float) -> bool:
    return now - pushed.at <= SILENT_SECONDS


def _sample(name: str, pushed: _Pushed, value: float) -> bytes:
    return f'{name}{{ident="{pushed.ident}",role="{pushed.role}"}} {value!r}\n'.encode()
