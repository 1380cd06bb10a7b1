"""The rows that a trajectory's steps grow into, while they grow."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from service.handoff.prefixes.tree import Place
from service.types import Int32s, Steps


class Kind(NamedTuple):
    """What a row has one of, so that only steps of one kind share a row."""

    temperature: float
    has_logprobs: bool

    @staticmethod
    def of(steps: Steps, k: int) -> Kind:
        """The kind of item `k`."""
        return Kind(float(steps.temperature_K[k]), bool(steps.has_logprobs_K[k]))


class Segment(NamedTuple):
    """Tokens `start:stop` of the steps' token axis, as part of a row."""

    start: int
    stop: int
    live: bool
    place: int
    """Where in the row it begins."""


@dataclass(slots=True, eq=False)
class OpenRow:
    """A row that may still grow; its tokens are the whole tokens of its last step."""

    number: int
    kind: Kind
    tip: Place
    """Where those tokens end in the trajectory's tree."""
    prompt_length: int
    first_sampled: int
    """Where the first response stands, in the row's prompt if the row is a fork."""
    steps: list[int] = field(default_factory=list)
    """Items of the table, in order."""
    segments: list[Segment] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Where in the row steps end."""
    moved: dict[int, float] = field(default_factory=dict)
    """Rewards of responses that drift took out of the row, by the place where they stand now."""

    def has_end(self, length: int) -> bool:
        """Whether a step ends after so many tokens."""
        at = bisect_left(self.ends, length)
        return self.ends[at : at + 1] == [length]


class RowsByEnd:
    """Rows by kind and by where they end, so that the one which a prompt continues is found at once."""

    def __init__(self) -> None:
        self._rows: dict[Place, dict[Kind, list[OpenRow]]] = {}
        self._passed: dict[Kind, set[Place]] = {}
        """Ends of rows from which tokens go on that are not of those rows."""

    def add(self, row: OpenRow) -> None:
        """A row ends where its tip is."""
        self._rows.setdefault(row.tip, {}).setdefault(row.kind, []).append(row)
        self.passed(row.tip)

    def remove(self, row: OpenRow) -> None:
        """It does so no longer."""
        kinds = self._rows[row.tip]
        kinds[row.kind].remove(row)
        if not kinds[row.kind]:
            del kinds[row.kind]
            self._passed.get(row.kind, set()).discard(row.tip)

    def passed(self, place: Place) -> None:
        """Tokens may have been added after this place."""
        if (kinds := self._rows.get(place)) and place.goes_on:
            for kind in kinds:
                self._passed.setdefault(kind, set()).add(place)

    def begun_with(self, prompt: Place, kind: Kind) -> OpenRow | None:
        """The longest row of this kind with all of which a prompt begins; of several that are equal, the first."""
        rows = self._rows.get(prompt, {}).get(kind)
        if rows is None:
            passed = [place for place in self._passed.get(kind, ()) if place.is_on_the_way_to(prompt)]
            if not passed:
                return None
            rows = self._rows[max(passed, key=lambda place: place.length)][kind]
        return min(rows, key=lambda row: row.number)


def drifted(tail: Int32s, rest: Int32s, limit: int) -> int:
    """Of a row's tokens from the first mismatch on: how many until what is left of them stands in the prompt again.

    >>> drifted(np.array([7, 4, 5]), np.array([8, 9, 4, 5, 6]), limit=16)  # 7 became 8 9, then 4 5 go on
    2
    """
    smallest = len(tail)
    for shift in range(-limit, limit + 1):
        # tail[i] stands at rest[i + shift]; the drift ends after the last i where that does not hold
        low, high = max(0, -shift), min(len(tail), len(rest) - shift)
        if high < len(tail) or low >= high:
            continue
        differs = np.flatnonzero(tail[low:high] != rest[low + shift : high + shift])
        end = low + (int(differs[-1]) + 1 if len(differs) else 0)
        if end < len(tail):
            smallest = min(smallest, max(end, end + shift))
    return smallest


def truncated(steps: Steps, row: OpenRow, length: int, otherwise: int) -> int:
    """Cut a row after `length` tokens; returns how many tokens lost their loss by that.

    The rewards of what is cut off move to the last sampled token that stays, or else to the place `otherwise`: a row's
    rewards sum up to those of its steps however it was cut.
    """
    lost, reward = 0, sum(row.moved.pop(at) for at in [at for at in row.moved if at >= length])
    while row.segments and (segment := row.segments[-1]).place + segment.stop - segment.start > length:
        row.segments.pop()
        stop = segment.start + max(length - segment.place, 0)
        if segment.live:
            lost += int(np.count_nonzero(steps.loss_mask_N[stop : segment.stop]))
            if steps.token_rewards_N is not None:
                reward += float(steps.token_rewards_N[stop : segment.stop].sum(dtype=np.float64))
        if stop > segment.start:
            row.segments.append(segment._replace(stop=stop))
    while row.ends and row.ends[-1] > length:
        row.ends.pop()
    if reward:
        place = _last_sampled(steps, row, otherwise)
        row.moved[place] = row.moved.get(place, 0.0) + reward
    return lost


def _last_sampled(steps: Steps, row: OpenRow, otherwise: int) -> int:
    """Where in the row the last token stands that the policy sampled."""
    for segment in reversed(row.segments):
        if segment.live and len(sampled := np.flatnonzero(steps.loss_mask_N[segment.start : segment.stop])):
            return segment.place + int(sampled[-1])
    return otherwise
