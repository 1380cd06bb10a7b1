"""The newest metrics of one actor, as its Prometheus lines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from service.observe.metrics_table import BY_NAME

SILENT_SECONDS = 10.0
"""An actor that has pushed nothing for this long counts as down; the hub no longer serves its gauges."""

MAX_SNAPSHOT_BYTES = 4 << 20

_HEADER = re.compile(rb"^# HELP (\w+) .*\n# TYPE \w+ \w+\n", re.MULTILINE)


@dataclass(frozen=True)
class Pushed:
    """The newest push of one actor: the time of the push, and its Prometheus lines, by metric family."""

    role: str
    ident: str
    at: float
    samples: dict[str, bytes]

    def age(self, now: float) -> float:
        """Seconds since the actor pushed these metrics."""
        return now - self.at

    def is_up(self, now: float) -> bool:
        """Whether the actor pushed these metrics at most `SILENT_SECONDS` ago."""
        return self.age(now) <= SILENT_SECONDS

    def by_label(self, name: str, label: str, of_each: Literal["", "_sum", "_count"] = "") -> dict[str, float]:
        """The values of a metric family by the label `label`, summed over all other labels. `of_each`: which part of a
        histogram, its sums or its counts."""
        found: dict[str, float] = {}
        for line in self.samples.get(name, b"").decode().splitlines():
            of = re.search(rf'[{{,]{label}="([^"]*)"', line)
            if of is not None and line.startswith(f"{name}{of_each}{{"):
                found[of[1]] = found.get(of[1], 0.0) + float(line.split()[-1])
        return found

    def total(self, name: str) -> float:
        """The sum of all series of a metric family; 0 if the actor has no series of the family."""
        return sum(self.by_label(name, "role").values())

    def sample(self, name: str, value: float) -> bytes:
        """The Prometheus line of a metric about this actor, with the value `value`."""
        return f'{name}{{ident="{self.ident}",role="{self.role}"}} {value!r}\n'.encode()


def families(snapshot: bytes) -> dict[str, bytes]:
    """By the name of each metric family: its lines of samples. ValueError if a family is not in the table."""
    if len(snapshot) > MAX_SNAPSHOT_BYTES:
        raise ValueError(f"a snapshot of {len(snapshot)} bytes")
    headers = list(_HEADER.finditer(snapshot))
    ends = [header.start() for header in headers[1:]] + [len(snapshot)] * bool(headers)
    families = {header[1].decode(): snapshot[header.end() : end] for header, end in zip(headers, ends, strict=True)}
    if unknown := families.keys() - BY_NAME.keys():
        raise ValueError(f"not in the table of metrics: {sorted(unknown)}")
    return families
