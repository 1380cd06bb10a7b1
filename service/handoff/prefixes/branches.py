"""Merging a trajectory whose steps do not simply continue one another: forks, resets, drift, trees.

A row is built of segments of the steps' token axis. A segment is live where its tokens keep their loss, or context
where they stand only so that later tokens follow what the policy saw:

    step 0: prompt [1 2]        response [3 4]      row 0: live [1 2 3 4]
    step 1: prompt [1 2 3]      response [9]        row 1: context [1 2 3] (of step 0), live [9]

A step costs what its own tokens cost, and the way from where it branches off to where the row ends that it is compared
with, counted in branches; not what the trajectory has so far. Only in a tree with `drift: realign`, where rows lose
tokens, a step that goes on from no row's end is compared with every row: 1000 resets take half a million comparisons.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

from service.handoff.prefixes.history import History
from service.handoff.prefixes.rows import Kind, OpenRow, RowsByEnd, Segment, drifted, truncated
from service.handoff.prefixes.tree import Place, Tree, common
from service.types import Steps

Mode = Literal["off", "linear", "tree"]
Drift = Literal["fork", "realign"]


def check_choice(name: str, value: str, choices: Any) -> None:
    """ValueError unless a setting is one of the values of its literal type; any other would act like one of them."""
    known = get_args(choices)
    if value not in known:
        raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, known))}")


class Rule(NamedTuple):
    """How steps become rows."""

    mode: Mode = "linear"
    drift: Drift = "fork"
    max_drift_tokens: int = 16


def branching_rows(steps: Steps, first: int, stop: int, rule: Rule, counts: dict[str, int]) -> list[OpenRow]:
    """The rows of the trajectory that lies at items `first:stop`, sorted by step index."""
    made = _Rows(steps, rule, counts)
    for k in range(first, stop):
        made.add(k)
    return made.rows


class _Step(NamedTuple):
    """A step that has been put into the tree."""

    item: int
    number: int
    """Its index in the trajectory."""
    kind: Kind
    prompt_length: int
    prompt: Place
    """How far earlier steps have its prompt."""
    tip: Place
    """Where its whole tokens end."""


class _Outcome(NamedTuple):
    name: str
    continued: OpenRow | None
    """The row that the step goes on with; None: it begins a new one."""
    length: int
    """How many of that row's tokens it keeps."""
    first_sampled: int
    """Of a new row, see `OpenRow`."""


class _Rows:
    """The rows of one trajectory, while its steps are taken in."""

    def __init__(self, steps: Steps, rule: Rule, counts: dict[str, int]) -> None:
        self.rows: list[OpenRow] = []
        self._steps, self._rule, self._counts = steps, rule, counts
        self._history, self._tree, self._ends = History(steps), Tree(), RowsByEnd()
        self._tips: dict[int, Place] = {}
        """Where each step's whole tokens end, by index."""
        self._row_of: dict[int, OpenRow] = {}

    def add(self, k: int) -> None:
        """Take in item `k`, which comes after all steps before it."""
        self._history.add(k)
        step, parted = self._in_tree(k)
        outcome = self._outcome(step)
        row = outcome.continued
        if row is None:
            row = OpenRow(len(self.rows), step.kind, step.tip, step.prompt_length, outcome.first_sampled)
            self.rows.append(row)
        else:
            self._ends.remove(row)
            lost = truncated(self._steps, row, outcome.length, otherwise=step.tip.length - 1)
            self._counts["realigned_tokens"] += lost
        self._lengthen(row, step, outcome.length)
        self._ends.add(row)
        self._ends.passed(parted)
        if outcome.name != "first":
            self._counts[outcome.name] += 1

    def _in_tree(self, k: int) -> tuple[_Step, Place]:
        """Item `k` with its place in the tree; and where it leaves what the tree had."""
        steps, index = self._steps, int(self._steps.index_K[k])
        parent, cut = int(steps.extends_K[k]), int(steps.extends_length_K[k])
        own = steps.token_ids_N[steps.offsets_K[k] : steps.offsets_K[k + 1]]
        begin = self._tree.root if parent < 0 else self._tips[parent].before(cut)
        parted = self._tree.follow(begin, own)
        tip = self._tips[index] = self._tree.grow(parted, own[parted.length - cut :], index)
        kind, prompt_length = Kind.of(steps, k), cut + int(steps.prompt_length_K[k])
        prompt = parted.before(min(prompt_length, parted.length))
        return _Step(k, index, kind, prompt_length, prompt, tip), parted

    def _lengthen(self, row: OpenRow, step: _Step, length: int) -> None:
        """Let a row that has the `length` first tokens of a step have all of them."""
        own_start = int(self._steps.offsets_K[step.item])
        for piece in self._history.pieces(step.number, length, step.tip.length):
            row.segments.append(Segment(*piece, live=piece.start >= own_start, place=length))
            length += piece.stop - piece.start
        row.steps.append(step.item)
        row.ends.append(length)
        row.tip, self._row_of[step.number] = step.tip, row

    def _outcome(self, step: _Step) -> _Outcome:
        """What becomes of a step.

        A step that shares sampled tokens with the nearest row but does not go on from its end is `forked`; one that
        shares at most a first prompt is `reset`.
        """
        if not self.rows:
            return _Outcome("first", None, 0, step.prompt_length)
        if self._rule.mode == "linear":
            last = self.rows[-1]
            return self._among([last], [common(last.tip, step.prompt)], step)
        if (row := self._ends.begun_with(step.prompt, step.kind)) is not None:
            return _Outcome("extended", row, row.tip.length, 0)
        if self._rule.drift == "realign":
            return self._among(self.rows, step.prompt.shared_with(row.tip for row in self.rows), step)
        # no row ever loses tokens, so the step that brought the last shared one is of a row that has them all
        nearest = self._row_of[step.prompt.owner] if step.prompt.length else self.rows[0]
        return _parted(nearest, step.prompt.length, step)

    def _among(self, rows: list[OpenRow], shared: list[int], step: _Step) -> _Outcome:
        """The outcome by how many tokens each row shares with the prompt."""
        alike = [c for c, row in enumerate(rows) if row.kind == step.kind]
        near = max(alike, key=shared.__getitem__, default=None)
        if near is not None:
            row, length = rows[near], shared[near]
            if length == row.tip.length:
                return _Outcome("extended", row, length, 0)
            if self._rule.drift == "realign" and self._drifted(row, length, step):
                return _Outcome("realigned", row, length, 0)
        nearest = max(range(len(rows)), key=shared.__getitem__)
        return _parted(rows[nearest], shared[nearest], step)

    def _drifted(self, row: OpenRow, shared: int, step: _Step) -> bool:
        """Whether a prompt is the row with a short mismatch, and no branch: that leaves the row where a step ends."""
        limit = self._rule.max_drift_tokens
        if shared < row.prompt_length or row.has_end(shared) or step.prompt_length + limit < row.tip.length:
            return False
        last = int(self._steps.index_K[row.steps[-1]])
        prompt = self._history.tokens(step.number, shared, step.prompt_length)
        return drifted(self._history.tokens(last, shared), prompt, limit) <= limit


def _parted(nearest: OpenRow, shared: int, step: _Step) -> _Outcome:
    if shared > nearest.first_sampled:
        return _Outcome("forked", None, 0, nearest.first_sampled)
    return _Outcome("reset", None, 0, step.prompt_length)
