"""Lines of a part's table: a figure with its estimated range, and the verdict."""

from __future__ import annotations

import math
from typing import NamedTuple

Figures = dict[str, str | float]
"""One line: figure, value, unit, low, high, verdict, note; a line with `not run` has no value."""


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
