"""What the ranks publish, in parts: the bytes of a weights file that a rank holds, one after another, and their
positions in the file.

    file     | header | a: rows 0 1 | a: rows 2 3 | b: row 0 | b: row 1 |
    rank 0   | header | a: rows 0 1 |             | b: row 0 |                part: header, rows 0 1 of a, row 0 of b
    rank 1                          | a: rows 2 3 |          | b: row 1 |     part: rows 2 3 of a, row 1 of b

A weights file is a safetensors file, `header length (8 bytes) | header (JSON) | data`. No rank ever has the whole
file: each rank copies only its own rows, see `part_buffers.py`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from actors.weights.memory import PAGE
from service.errors import BatonError
from service.types import PolicyVersion

TRAINER = "trainer"
"""Name of all ranks together in `service.run.liveness.supervisor.Supervisor`."""
MIN_BYTES_PER_SECOND = 100e6
"""Rate at which weights must arrive at an engine; Ray's object store is several times as fast between hosts."""


@dataclass(frozen=True)
class WeightPart:
    """The positions of a part's bytes in the file, as spans in the order of the file."""

    spans: tuple[tuple[int, int], ...]
    """The first byte in the file and the number of bytes of each span."""

    @staticmethod
    def of_spans(spans: Sequence[tuple[int, int]]) -> WeightPart:
        """Make a part of these spans, each (first byte, number of bytes); adjacent spans become one.

        >>> WeightPart.of_spans([(0, 8), (8, 4), (20, 4)]).spans
        ((0, 12), (20, 4))
        """
        joined = list[tuple[int, int]]()
        for start, n_bytes in spans:
            if joined and sum(joined[-1]) == start:
                start, n_bytes = joined[-1][0], joined.pop()[1] + n_bytes
            joined.append((start, n_bytes))
        return WeightPart((*joined,))

    @cached_property
    def ends(self) -> list[int]:
        """Return for each span the number of bytes of the part up to the end of the span."""
        return [*accumulate(n_bytes for _, n_bytes in self.spans)]

    @property
    def n_bytes(self) -> int:
        """Return the number of bytes of the part."""
        return self.ends[-1] if self.ends else 0

    def within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the spans of the file, each as (first byte, number of bytes), that hold the bytes from `start` to
        `stop` of the part.

        >>> WeightPart.of_spans([(0, 8), (20, 4)]).within(6, 10)
        [(6, 2), (20, 2)]
        """
        found = list[tuple[int, int]]()
        for n in range(bisect_right(self.ends, start), bisect_left(self.ends, stop) + 1):
            at, n_bytes = self.spans[n]
            begin = self.ends[n] - n_bytes
            first, last = max(start, begin), min(stop, self.ends[n])
            found.append((at + first - begin, last - first))
        return found


class Source(NamedTuple):
    """The place in shared memory from which processes of the same host read a part of a weights file, or an image with
    the whole file."""

    part: WeightPart
    path: str
    """Path of the memory, see `WeightMemory`."""
    start: int = PAGE
    """First byte of the buffer in the memory."""
    buffer: int = 0
    """Number of the buffer in the memory."""


class WeightBucket(NamedTuple):
    """The description of bytes of a part that travel as one message: their positions in the file, and their
    checksum."""

    spans: tuple[tuple[int, int], ...]
    """The first byte in the file and the number of bytes of each span of the message."""
    checksum: int


def check_parts(parts: Sequence[WeightPart]) -> None:
    """Check that these parts contain each byte of one file exactly once.

    Raises:
        ValueError: some bytes are missing or occur twice.
    """
    whole = WeightPart.of_spans(sorted(span for part in parts for span in part.spans))
    if [start for start, _ in whole.spans] != [0]:
        raise ValueError("the parts of the ranks are not each byte of the weights once")


class TrainerLost(BatonError):
    """A rank died, raised an error or did not answer, so the trainer's ranks cannot continue.

    `is_remedied`: whether the rank ran out of memory, and the ranks will need less memory from their next start on.
    """

    def __init__(self, why: str, is_remedied: bool = False) -> None:
        super().__init__(why)
        self.is_remedied = is_remedied


@dataclass(frozen=True)
class PublishedWeights:
    """One version of the weights that is sent to the engines."""

    version: PolicyVersion
    sources: tuple[Source, ...] = ()
    """Each rank's part of the safetensors file, with the place from which processes of its host read the part; empty
    for transport `ipc`."""

    @property
    def sizes(self) -> list[int]:
        """Return the number of bytes of each rank's part."""
        return [source.part.n_bytes for source in self.sources]

    def seconds(self, deadline: float) -> float:
        """Return `deadline` plus the seconds that sending the bytes may take."""
        return deadline + sum(self.sizes) / MIN_BYTES_PER_SECOND
