"""The document of `make gpu` as markdown, for docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COLUMNS = ("figure", "value", "unit", "expected", "verdict", "note")


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
