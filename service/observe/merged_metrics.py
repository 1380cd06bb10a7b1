"""The metrics hub without Ray or HTTP: merges the actors' metrics into one page and their reports into one status."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from service.clock import Clock
from service.observe.bound_by import Window
from service.observe.metrics_table import TABLE
from service.observe.pushed import Pushed, families
from service.observe.status_document import PARTS, Status, status_document

RATE_REPORTS = 10
"""Number of the buffer's reports (one each second) from which the hub computes tokens per second."""

HISTORY_STEPS = 5000
"""Maximum number of optimizer steps that the status page can show."""

HISTORY_KEYS = (
    "reward/avg_raw_reward",
    "generate/batch_padded_seq_len",
    "generate/avg_num_tokens",
    "async/staleness_mean",
    "async/staleness_max",
    "timing/step",
    "timing/wait_for_generation_buffer",
    "policy/policy_entropy",
)
"""Metrics of an optimizer step that the status page draws, besides those whose names begin with `environment/`."""

MAX_SOURCES = 4096
"""Maximum number of actors that the hub keeps: a sender of invented names must not fill its memory."""

_SOURCE = re.compile(r"[\w.-]{1,64}(/[\w.-]{1,64})?", re.ASCII)


class Hub:
    """Keeps the last snapshot of every actor and the last report of every part of the run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._window = Window()
        self._sources: dict[str, Pushed] = {}
        self._parts: dict[str, dict[str, Any]] = {}
        self._accepted: deque[tuple[float, float]] = deque(maxlen=RATE_REPORTS)
        self._steps: deque[dict[str, Any]] = deque(maxlen=HISTORY_STEPS)

    def push(self, source: str, snapshot: bytes) -> None:
        """Store the metrics of the actor `source` (`role/ident`) in place of its previous metrics.

        Raises:
            ValueError: the name is malformed, there are too many actors, the snapshot is too large, or a metric is not
                in the table.
        """
        if not _SOURCE.fullmatch(source):
            raise ValueError(f"{source[:80]!r} is no name of an actor")
        if source not in self._sources and len(self._sources) >= MAX_SOURCES:
            raise ValueError(f"{MAX_SOURCES} names are known already; {source} is one too many")
        role, _, ident = source.partition("/")
        self._sources[source] = Pushed(role, ident or role, self._clock.monotonic(), families(snapshot))

    def forget(self, source: str) -> None:
        """Forget an actor that has left for good: it is no longer shown, and not reported as missing."""
        self._sources.pop(source, None)

    def put_status(self, part: str, report: Mapping[str, Any]) -> None:
        """Store a report. `part`: `run` (the driver's report), `buffer` (the buffer's), or `step` (about the newest
        optimizer step)."""
        if part not in PARTS:
            raise ValueError(f"{part[:80]!r} is no part of the status")
        self._parts[part] = _finite(dict(report))
        if part == "buffer" and "accepted_tokens" in report:
            self._accepted.append((self._clock.monotonic(), report["accepted_tokens"]))
            self._parts[part]["tokens_per_second"] = _rate(self._accepted)
            self._window.sample(self._clock.monotonic(), self._sources.values())
        if part == "step" and "trainer/global_step" in report:
            while self._steps and self._steps[-1]["trainer/global_step"] >= report["trainer/global_step"]:
                self._steps.pop()  # a trainer that went back to a checkpoint repeats these steps
            self._steps.append(self._parts[part])

    def page(self) -> bytes:
        """All metrics as Prometheus text; the metric families are in the order of the metrics table."""
        now = self._clock.monotonic()
        actors = self._sources.values()
        blocks: list[bytes] = []
        for metric in TABLE:
            if metric.name == "baton_actor_up":
                lines = [actor.sample(metric.name, float(actor.is_up(now))) for actor in actors]
            elif metric.name == "baton_actor_age_seconds":
                lines = [actor.sample(metric.name, actor.age(now)) for actor in actors]
            elif metric.name == "baton_binding_ratio":
                found = self._window.whole()
                lines = [
                    f'{metric.name}{{ident="metrics-hub",part="{part}",role="hub"}} {share!r}\n'.encode()
                    for part, share in ({} if found is None else found["shares"]).items()
                ]
            else:
                served = [actor for actor in actors if metric.kind != "gauge" or actor.is_up(now)]
                lines = [actor.samples[metric.name] for actor in served if metric.name in actor.samples]
            if lines:
                blocks.append(f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n".encode())
                blocks.extend(lines)
        return b"".join(blocks)

    def status(self) -> Status:
        """The document of `/status`."""
        now = self._clock.monotonic()
        actors = [
            {
                "role": pushed.role,
                "ident": pushed.ident,
                "host": next(iter(pushed.by_label("baton_actor_host_info", "host")), ""),
                "state": "up" if pushed.is_up(now) else "silent",
                "age_seconds": round(pushed.age(now), 3),
                "leaked_tasks": int(pushed.total("baton_environment_leaked_tasks")),
            }
            for _, pushed in sorted(self._sources.items())
        ]
        sessions, oldest = Counter[str](), dict[str, float]()
        for pushed in self._sources.values():
            if pushed.is_up(now):
                sessions.update(pushed.by_label("baton_agent_sessions", "state"))
                for state, age in pushed.by_label("baton_agent_oldest_session_seconds", "state").items():
                    oldest[state] = max(oldest.get(state, 0.0), age)
        counts = {state: int(count) for state, count in sessions.items()}
        agents = {"sessions": counts, "oldest_seconds": oldest} if counts else {}
        more = {"agents": agents, "binding": self._window.now()}
        return status_document(self._parts, actors, self._clock.wall()) | more

    def history(self, after: int) -> dict[str, Any]:
        """The metrics `HISTORY_KEYS` and those of environments, of the optimizer steps after step `after`, for charts:
        one list of values per metric. Only the newest `HISTORY_STEPS` steps are kept."""
        steps = [step for step in self._steps if step["trainer/global_step"] > after]
        keys = HISTORY_KEYS + tuple(sorted({key for step in steps for key in step if key.startswith("environment/")}))
        return {
            "steps": [step["trainer/global_step"] for step in steps],
            "columns": {key: [step.get(key) for step in steps] for key in keys},
        }

    def silent(self) -> list[str]:
        """The actors that have not pushed metrics for too long."""
        now = self._clock.monotonic()
        return sorted(source for source, pushed in self._sources.items() if not pushed.is_up(now))


def _rate(totals: Sequence[tuple[float, float]]) -> float:
    """The growth per second of a total, from the first to the last pair of (time in seconds, total)."""
    if not totals or totals[-1][0] <= totals[0][0]:
        return 0.0
    (start, before), (now, after) = totals[0], totals[-1]
    return max(0.0, after - before) / (now - start)


def _finite(value: Any) -> Any:
    """A report in which None replaces each number that is not finite. JSON has no such numbers, so a browser would
    refuse the whole document."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
