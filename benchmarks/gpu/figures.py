"""Lines of a part's table: a figure with its estimated range, and the verdict; and the tables as markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Figures = dict[str, str | float]
"""One line: figure, value, unit, low, high, verdict, note; a line with `not run` has no value."""

Give = Callable[[Figures], None]

COLUMNS = ("figure", "value", "unit", "expected", "verdict", "note")


class Range(NamedTuple):
    """The range of a figure that is expected on an H100."""

    low: float
    high: float


def line(figure: str, value: float, unit: str, expected: Range | None = None, note: str = "") -> Figures:
    """A measured figure; without a range it has no verdict."""
    found: Figures = {"figure": figure, "value": value, "unit": unit}
    if expected is not None:
        inside = "below" if value < expected.low else "above" if value > expected.high else "inside"
        inside = "failed" if math.isnan(value) else inside
        found |= {"low": expected.low, "high": expected.high, "verdict": inside}
    return found | ({"note": note} if note else {})


def not_run(figure: str, reason: str) -> Figures:
    """A figure that this machine cannot show."""
    return {"figure": figure, "verdict": "not run", "note": reason}


def markdown(document: Mapping[str, Any]) -> str:
    """A description of the machine, then a heading for each part with its table, or with the reason why it has none."""
    machine = ", ".join(f"{name} {_cell(value)}" for name, value in document["machine"].items())
    lines = [f"`make gpu`, {document['seconds'] / 60:.0f} minutes: {machine}", ""]
    for part in document["parts"]:
        lines += [f"### {part['title']}", ""]
        if part["state"] != "measured":
            lines += [f"{part['state']}: {part['reason']}", ""]
        if part["figures"]:
            lines += [*_table(part["figures"]), ""]
    return "\n".join(lines)


def _table(figures: Sequence[Mapping[str, str | float]]) -> Iterator[str]:
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|" + "---|" * len(COLUMNS)
    for line in figures:
        expected = {"expected": f"{_cell(line['low'])} to {_cell(line['high'])}"} if "low" in line else {}
        yield "| " + " | ".join(_cell({**line, **expected}.get(name, "")) for name in COLUMNS) + " |"


def _cell(value: str | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")
