"""Costs of the parts of a run other than the model's operations; the numbers and their sources are in costs.toml."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A constant: seconds, bytes, bytes/s or a factor."""

    value: float
    source: str
    """Where and when the value was measured, or "assumed"."""
    what: str = ""
    """Description on the page of a plan for GPUs, with `{}` for the value; empty: the page does not list this cost."""


_COSTS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, dict[str, Cost]])
CPU, GPU, TRAINER, WEIGHTS = (
    {name: cost.value for name, cost in _COSTS[of].items()} for of in ("cpu", "gpu", "trainer", "weights")
)
"""Values of the constants by name, in seconds, bytes or bytes/s."""


def listed() -> Iterator[str]:
    """A line for each constant on which a plan for GPUs rests, with its source."""
    for cost in (cost for costs in _COSTS.values() for cost in costs.values() if cost.what):
        value = cost.value / 1e9 if cost.value >= 1e6 else cost.value
        yield f"{cost.what.format(f'{value:g}')}: {cost.source}"
