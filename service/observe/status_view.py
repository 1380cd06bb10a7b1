"""The `/status` document for a terminal: the road of the data, where everything is, and who waits for what."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from service.observe.status import Status

Column = tuple[str, tuple[str, ...]]
"""A station of the road, and the lines below it."""

WAYS = ("claim", "submit", "lease", "publish")

LABEL = 12
"""Columns in front of what a label says."""


def status_lines(status: Status, width: int | None = None) -> list[str]:
    """What a run is doing now, or how it ended; in a terminal of so many columns, or as wide as it gets."""
    if "summary" in status:
        return ended_lines(status["folder"], status["summary"])
    lines = _lines(status, width)
    return lines if width is None else [part for line in lines for part in _wrapped(line, width)]


def _wrapped(line: str, width: int) -> list[str]:
    indent = " " * LABEL
    return textwrap.wrap(line, max(width, 2 * LABEL), subsequent_indent=indent, break_on_hyphens=False) or [""]


def _lines(status: Status, width: int | None) -> list[str]:
    road = ["  " + line for line in road_lines(stations(status))]
    if width is not None and max(map(len, road)) > width:
        road = ["  " + line for line in road_lines(stations(status), ways=("",) * len(WAYS))]
    lines = [headline(status), "", *road]
    lines += ["", *_counts("groups", status["buffer"].get("groups", {})), *_counts("tokens", status["tokens"])]
    step, run = status["step"], status["run"]
    if "reward/avg_raw_reward" in step:
        ago = f", {_span(status['time'] - run['stepped'])} ago" if "stepped" in run else ""
        lines.append(
            f"  {'last step':<10}reward {step['reward/avg_raw_reward']:.3f}, padded length "
            f"{step.get('generate/batch_padded_seq_len', 0):.0f} tokens{ago}"
        )
    for wait in status["waits"]:
        detail = f": {wait['detail']}" if wait["detail"] else ""
        lines.append(
            f"  {'waits':<10}{wait['who']} for {wait['reason']}{detail}, {_span(status['time'] - wait['since'])}"
        )
    silent = [actor["ident"] for actor in status["actors"] if actor["state"] != "up"]
    if silent:
        lines.append(f"  {'silent':<10}{', '.join(silent)}")
    return lines


def ended_lines(folder: str, summary: Mapping[str, Any]) -> list[str]:
    """How a run ended."""
    lines = [f"{folder}: {summary['state']} after {summary.get('steps', 0)} optimizer steps"]
    if "reason" in summary:
        lines = [f"{folder}: {summary['state']}", f"  {summary['reason']}"]
    if summary.get("reward_gain") is not None:
        lines.append(
            f"  reward {summary['reward_first_tenth']:.3f} over the first tenth of the steps, "
            f"{summary['reward_last_tenth']:.3f} over the last"
        )
    return lines


def headline(status: Status) -> str:
    """Name, state and progress in a line."""
    run, version = status["run"], status["policy_version"]
    steps = f"{version['step']} of {run['max_steps']}" if "max_steps" in run else f"{version['step']}"
    since = f", {_span(status['time'] - run['started'])}" if "started" in run else ""
    state = status["state"].replace("_", " ")
    return f"{run.get('name', 'run')}: {state}, step {steps}, policy {version['incarnation']}.{version['step']}{since}"


def stations(status: Status) -> list[Column]:
    """What to say below each station of the road."""
    run, buffer, step, version = status["run"], status["buffer"], status["step"], status["policy_version"]
    groups = buffer.get("groups", {})
    up = sum(actor["role"] == "generator" and actor["state"] == "up" for actor in status["actors"])
    return [
        ("prompts", (f"{_number(buffer.get('issued'))} issued",)),
        (
            "GENERATORS",
            (
                f"{up} of {run['generators']} up" if "generators" in run else f"{up} up",
                f"{_number(buffer.get('tokens_per_second'))} tokens/s",
                f"waited {_percent(step.get('async/generator_wait_fraction'))}",
            ),
        ),
        ("BUFFER", tuple(f"{_number(groups.get(state))} {state}" for state in ("open", "complete", "leased"))),
        (
            "TRAINER",
            (
                f"{_number(step.get('timing/step'), 2)} s/step",
                f"waited {_percent(step.get('async/trainer_wait_fraction'))}",
                f"staleness {_number(step.get('async/staleness_mean'), 2)}",
            ),
        ),
        (
            "WEIGHTS",
            (
                f"version {version['incarnation']}.{version['step']}",
                f"sync {_number(step.get('timing/sync_weights'), 2)} s",
            ),
        ),
    ]


def road_lines(columns: Sequence[Column], ways: Sequence[str] = WAYS) -> list[str]:
    """The stations side by side, with the ways between them; a way without a name is an arrow.

    >>> for line in road_lines([("prompts", ("9 issued",)), ("GENERATORS", ("1 up",))]): print(line)
    prompts --claim--> GENERATORS
    9 issued           1 up
    """
    arrows = [f" --{way}--> " if way else " --> " for way in ways[: len(columns) - 1]] + [""]
    road = [name + arrow for (name, _), arrow in zip(columns, arrows, strict=True)]
    widths = [
        max(len(part), 2 + max((len(line) for line in lines), default=0))
        for part, (_, lines) in zip(road, columns, strict=True)
    ]
    out = ["".join(_stretched(part, width) for part, width in zip(road, widths, strict=True))]
    for row in range(max(len(lines) for _, lines in columns)):
        cells = (lines[row] if row < len(lines) else "" for _, lines in columns)
        out.append("".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)))
    return [line.rstrip() for line in out]


def _stretched(part: str, width: int) -> str:
    """A station and its way; a longer way where the lines below need it."""
    return part.replace("--> ", "-" * (width - len(part)) + "--> ") if "--> " in part else part.ljust(width)


def _counts(label: str, counts: Mapping[str, int]) -> list[str]:
    shown = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)
    return [f"  {label:<10}{shown}"] if shown else []


def _number(value: Any, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
