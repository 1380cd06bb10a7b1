"""Merging a trajectory whose steps do not simply continue one another: forks, resets, drift, trees.

A row is built of segments of the steps' token axis. A segment is live where its tokens keep their loss, or context
where they stand only so that later tokens follow what the policy saw:

    step 0: prompt [1 2]        response [3 4]      row 0: live [1 2 3 4]
    step 1: prompt [1 2 3]      response [9]        row 1: context [1 2 3] (of step 0), live [9]

A step costs what its own tokens cost, and the number of branches between where it branches off and the end of the row
that it is compared with; not what the trajectory has so far. Only in a tree with `drift: realign`, where rows lose
tokens, a step that continues no row is compared with every row: 1000 resets take half a million comparisons.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from service.handoff.prefixes.prefix_index import IndexedStep, PrefixIndex
from service.handoff.prefixes.tree import Place, common
from service.types import Int32s, Steps

Mode = Literal["off", "linear", "tree"]
Drift = Literal["fork", "realign"]


class Rule(NamedTuple):
    """How steps become rows."""

    mode: Mode = "linear"
    drift: Drift = "fork"
    max_drift_tokens: int = 16


class Kind(NamedTuple):
    """What a row has one of, so that only steps of one kind share a row."""

    temperature: float
    has_logprobs: bool


class Segment(NamedTuple):
    """Tokens `start:stop` of the steps' token axis, as part of a row."""

    start: int
    stop: int
    live: bool
    place: int
    """Where in the row it begins."""


@dataclass(slots=True, eq=False)
class OpenRow:
    """A row that may still grow; its tokens are the prompt and response of its last step."""

    number: int
    kind: Kind
    tip: Place
    """Where its tokens end in the trajectory's tree."""
    prompt_length: int
    first_sampled: int
    """Where the first response stands, in the row's prompt if the row is a fork."""
    steps: list[int] = field(default_factory=list)
    """Items of the table, in order."""
    segments: list[Segment] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Where in the row steps end."""
    moved: dict[int, float] = field(default_factory=dict)
    """Rewards of responses that realigning removed from the row, by the place where they stand now."""


def branching_rows(steps: Steps, first: int, stop: int, rule: Rule, counts: dict[str, int]) -> list[OpenRow]:
    """The rows of the trajectory that lies at items `first:stop`, sorted by step index; adds to the counts."""
    builder = _RowBuilder(steps, rule, counts)
    for k in range(first, stop):
        builder.add(k)
    return builder.rows


class _NewStep(NamedTuple):
    """A step that is to become part of a row."""

    item: int
    kind: Kind
    indexed: IndexedStep
    prompt: Place
    """Where its prompt ends; inside what earlier steps had, where the prompt goes on with new tokens."""
    prompt_length: int


class _Outcome(NamedTuple):
    name: str
    continued: OpenRow | None
    """The row that the step continues; None: it begins a new one."""
    length: int
    """How many of that row's tokens it keeps."""
    first_sampled: int
    """Of a new row, see `OpenRow`."""


class _RowBuilder:
    """The rows of one trajectory, built step by step."""

    def __init__(self, steps: Steps, rule: Rule, counts: dict[str, int]) -> None:
        self.rows: list[OpenRow] = []
        self._steps, self._rule, self._counts = steps, rule, counts
        self._index, self._rows_by_tip = PrefixIndex(), _RowsByTip()
        self._row_of: dict[int, OpenRow] = {}
        """By step index."""

    def add(self, k: int) -> None:
        """Add item `k`, which comes after all steps before it."""
        steps, indexed = self._steps, self._index.add(self._steps, k)
        kind = Kind(float(steps.temperature_K[k]), bool(steps.has_logprobs_K[k]))
        length, tip = indexed.cut + int(steps.prompt_length_K[k]), indexed.tip
        prompt = indexed.branch.before(min(length, indexed.branch.length))
        step = _NewStep(k, kind, indexed, prompt, length)
        outcome = self._outcome(step)
        row = outcome.continued
        if row is None:
            row = OpenRow(len(self.rows), kind, tip, length, outcome.first_sampled)
            self.rows.append(row)
        else:
            self._rows_by_tip.remove(row)
            self._counts["realigned_tokens"] += truncate(steps, row, outcome.length, otherwise=tip.length - 1)
        self._extend(row, step, outcome.length)
        self._rows_by_tip.add(row)
        self._rows_by_tip.note_more(indexed.branch)
        if outcome.name != "first":
            self._counts[outcome.name] += 1

    def _extend(self, row: OpenRow, step: _NewStep, length: int) -> None:
        """Give a row that has the first `length` tokens of a step all of them."""
        for start, stop in step.indexed.segments(length, step.indexed.tip.length):
            row.segments.append(Segment(start, stop, live=start >= step.indexed.own_start, place=length))
            length += stop - start
        row.steps.append(step.item)
        row.ends.append(length)
        row.tip, self._row_of[int(self._steps.index_K[step.item])] = step.indexed.tip, row

    def _outcome(self, step: _NewStep) -> _Outcome:
        """What becomes of a step.

        A step that shares sampled tokens with the nearest row but does not continue its end is `forked`; one that
        shares at most a first prompt is `reset`.
        """
        if not self.rows:
            return _Outcome("first", None, 0, step.prompt_length)
        if self._rule.mode == "linear":
            last = self.rows[-1]
            return self._nearest_of([last], [common(last.tip, step.prompt)], step)
        if (row := self._rows_by_tip.longest_prefix(step.prompt, step.kind)) is not None:
            return _Outcome("extended", row, row.tip.length, 0)
        if self._rule.drift == "realign":
            return self._nearest_of(self.rows, step.prompt.shared_with(row.tip for row in self.rows), step)
        # rows only grow, so the owner of the last shared token holds the whole shared prefix
        nearest = self._row_of[step.prompt.owner] if step.prompt.length else self.rows[0]
        return _new_row(nearest, step.prompt.length, step)

    def _nearest_of(self, rows: list[OpenRow], shared: list[int], step: _NewStep) -> _Outcome:
        """The outcome by how many tokens each row shares with the prompt."""
        same_kind = [r for r, row in enumerate(rows) if row.kind == step.kind]
        near = max(same_kind, key=shared.__getitem__, default=None)
        if near is not None:
            row, length = rows[near], shared[near]
            if length == row.tip.length:
                return _Outcome("extended", row, length, 0)
            if self._rule.drift == "realign" and self._drifted(row, length, step):
                return _Outcome("realigned", row, length, 0)
        nearest = max(range(len(rows)), key=shared.__getitem__)
        return _new_row(rows[nearest], shared[nearest], step)

    def _drifted(self, row: OpenRow, shared: int, step: _NewStep) -> bool:
        """Whether a prompt is the row with a short mismatch, and no branch: that leaves the row where a step ends."""
        limit, at = self._rule.max_drift_tokens, bisect_left(row.ends, shared)
        if (
            shared < row.prompt_length
            or step.prompt_length + limit < row.tip.length
            or row.ends[at : at + 1] == [shared]
        ):
            return False
        prompt = step.indexed.tip.before(step.prompt_length).tokens(shared)
        return drift_length(row.tip.tokens(shared), prompt, limit) <= limit


def _new_row(nearest: OpenRow, shared: int, step: _NewStep) -> _Outcome:
    if shared > nearest.first_sampled:
        return _Outcome("forked", None, 0, nearest.first_sampled)
    return _Outcome("reset", None, 0, step.prompt_length)


class _RowsByTip:
    """Rows by their last token, so that the row which a prompt continues is found at once."""

    def __init__(self) -> None:
        self._rows: dict[Place, dict[Kind, list[OpenRow]]] = {}
        self._inner: dict[Kind, set[Place]] = {}
        """Tips of rows after which the tree goes on with tokens that are not of those rows."""

    def add(self, row: OpenRow) -> None:
        """Index a row by its tip."""
        self._rows.setdefault(row.tip, {}).setdefault(row.kind, []).append(row)
        self.note_more(row.tip)

    def remove(self, row: OpenRow) -> None:
        """Remove a row, whose tip will move."""
        kinds = self._rows[row.tip]
        kinds[row.kind].remove(row)
        if not kinds[row.kind]:
            del kinds[row.kind]
            self._inner.get(row.kind, set()).discard(row.tip)

    def note_more(self, place: Place) -> None:
        """Tokens may have been added to the tree after this place."""
        if (kinds := self._rows.get(place)) and place.has_more:
            for kind in kinds:
                self._inner.setdefault(kind, set()).add(place)

    def longest_prefix(self, prompt: Place, kind: Kind) -> OpenRow | None:
        """The longest row of this kind with all of whose tokens a prompt begins; of equal ones, the first."""
        rows = self._rows.get(prompt, {}).get(kind)
        if rows is None:
            inner = [place for place in self._inner.get(kind, ()) if place.is_prefix_of(prompt)]
            if not inner:
                return None
            rows = self._rows[max(inner, key=lambda place: place.length)][kind]
        return min(rows, key=lambda row: row.number)


def drift_length(tail: Int32s, rest: Int32s, limit: int) -> int:
    """How many tokens of a row, from the first mismatch on, pass until the rest of them stands in the prompt again.

    `tail`: the row's tokens from the mismatch on; `rest`: the prompt's. All of `tail` if that never happens with a
    shift of at most `limit` tokens.

    >>> drift_length(np.array([7, 4, 5]), np.array([8, 9, 4, 5, 6]), limit=16)  # 7 became 8 9, then 4 5 follow
    2
    """
    smallest = len(tail)
    # A larger shift leaves the end of `tail` without a place in `rest`; a smaller one, all of `tail`.
    for shift in range(max(-limit, 1 - len(tail)), min(limit, len(rest) - len(tail)) + 1):
        # tail[i] stands at rest[i + shift]; the drift ends after the last i where that does not hold
        low = max(0, -shift)
        differs = np.flatnonzero(tail[low:] != rest[low + shift : len(tail) + shift])
        end = low + (int(differs[-1]) + 1 if len(differs) else 0)
        if end < len(tail):
            smallest = min(smallest, max(end, end + shift))
    return smallest


def truncate(steps: Steps, row: OpenRow, length: int, otherwise: int) -> int:
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
        place = otherwise
        for segment in reversed(row.segments):
            if segment.live and len(sampled := np.flatnonzero(steps.loss_mask_N[segment.start : segment.stop])):
                place = segment.place + int(sampled[-1])
                break
        row.moved[place] = row.moved.get(place, 0.0) + reward
    return lost
