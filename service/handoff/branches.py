"""Merging a trajectory whose steps do not simply continue one another: forks, resets, drift, trees.

A row is built of segments of the steps' token axis. A segment is live where its tokens keep their loss, or context
where they stand only so that later tokens follow what the policy saw:

    step 0: prompt [1 2]        response [3 4]      row 0: live [1 2 3 4]
    step 1: prompt [1 2 3]      response [9]        row 1: context [1 2 3] (of step 0), live [9]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from service.handoff.prefix import History, common_prefix, cut
from service.types import Int32s, Steps

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


class Segment(NamedTuple):
    """Tokens `start:stop` of the steps' token axis, as part of a row."""

    start: int
    stop: int
    live: bool


@dataclass(slots=True)
class OpenRow:
    """A row that may still grow; its tokens are the whole tokens of its last step."""

    steps: list[int]
    """Items of the table, in order."""
    tip: Int32s
    prompt_length: int
    first_sampled: int
    """Where the first response stands, in the row's prompt if the row is a fork."""
    segments: list[Segment] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)
    """Where in the row steps end."""
    moved: dict[int, float] = field(default_factory=dict)
    """Rewards of responses that drift took out of the row, by the place where they stand now."""


def branching_rows(steps: Steps, first: int, stop: int, rule: Rule, counts: dict[str, int]) -> list[OpenRow]:
    """The rows of the trajectory that lies at items `first:stop`, sorted by step index."""
    history, rows = History(steps), list[OpenRow]()
    for k in range(first, stop):
        history.add(k)
        _place(steps, k, history, rows, rule, counts)
    return rows


def _place(steps: Steps, k: int, history: History, rows: list[OpenRow], rule: Rule, counts: dict[str, int]) -> None:
    index, response_start = int(steps.index_K[k]), int(steps.offsets_K[k] + steps.prompt_length_K[k])
    tokens, pieces = history.tokens[index], history.pieces[index]
    prompt = tokens[: len(tokens) - (int(steps.offsets_K[k + 1]) - response_start)]
    candidates = rows if rule.mode == "tree" else rows[-1:]
    shared = [common_prefix(row.tip, prompt) for row in candidates]
    outcome, chosen, length = _outcome(steps, k, candidates, shared, prompt, rule)
    if outcome in ("forked", "reset", "first"):
        first_sampled = candidates[chosen].first_sampled if outcome == "forked" else len(prompt)
        row = OpenRow([], tokens, len(prompt), first_sampled)
        rows.append(row)
        length = 0
    else:
        row = candidates[chosen]
        counts["realigned_tokens"] += _truncate(steps, row, length, last=len(tokens) - 1)
    own_start = int(steps.offsets_K[k])
    row.segments += [Segment(*piece, live=piece.start >= own_start) for piece in cut(pieces, length, len(tokens))]
    row.steps.append(k)
    row.tip = tokens
    row.ends.add(len(tokens))
    if outcome != "first":
        counts[outcome] += 1


def _outcome(
    steps: Steps, k: int, candidates: list[OpenRow], shared: list[int], prompt: Int32s, rule: Rule
) -> tuple[str, int, int]:
    """What becomes of a step: the outcome, the nearest row, and how many of its tokens the step keeps when it goes on.

    A step that shares sampled tokens with the nearest row but does not go on from its end is `forked`; one that shares
    at most a first prompt is `reset`.
    """
    if not candidates:
        return "first", -1, 0
    alike = [c for c, row in enumerate(candidates) if _alike(steps, row.steps[-1], k)]
    whole = [c for c in alike if shared[c] == len(candidates[c].tip)]
    if whole:
        chosen = max(whole, key=lambda c: shared[c])
        return "extended", chosen, shared[chosen]
    near = max(alike, key=lambda c: shared[c], default=-1)
    if rule.drift == "realign" and near >= 0 and _drifted(candidates[near], prompt, shared[near], rule):
        return "realigned", near, shared[near]
    nearest = max(range(len(candidates)), key=lambda c: shared[c])
    sampled = shared[nearest] > candidates[nearest].first_sampled
    return ("forked" if sampled else "reset"), nearest, 0


def _alike(steps: Steps, a: int, b: int) -> bool:
    """Whether two steps may share a row: a row has one temperature, and log-probabilities or none."""
    return bool(steps.temperature_K[a] == steps.temperature_K[b] and steps.has_logprobs_K[a] == steps.has_logprobs_K[b])


def _drifted(row: OpenRow, prompt: Int32s, shared: int, rule: Rule) -> bool:
    """Whether a prompt is the row with a short mismatch, and no branch: that leaves the row where a step ends."""
    if shared < row.prompt_length or shared in row.ends:
        return False
    return drift_size(row.tip, prompt, shared, rule.max_drift_tokens) <= rule.max_drift_tokens


def drift_size(before: Int32s, prompt: Int32s, shared: int, limit: int) -> int:
    """Tokens between the first mismatch and the place from which the rest of `before` stands in the prompt again.

    >>> before, prompt = np.array([1, 2, 7, 4, 5]), np.array([1, 2, 8, 9, 4, 5, 6])
    >>> drift_size(before, prompt, 2, limit=16)      # 7 became 8 9, then 4 5 go on
    2
    """
    tail, rest = before[shared:], prompt[shared:]
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


def _truncate(steps: Steps, row: OpenRow, length: int, last: int) -> int:
    """Cut a row after `length` tokens; returns how many tokens lost their loss by that.

    The rewards of what is cut off move to the last sampled token that stays, or else to `last`, where the step that
    goes on ends: a row's rewards sum up to those of its steps however it was cut.
    """
    kept, lost, position, place = list[Segment](), 0, 0, last
    reward = sum(row.moved.pop(at) for at in [at for at in row.moved if at >= length])
    for segment in row.segments:
        stop = min(segment.stop, segment.start + max(length - position, 0))
        if segment.live:
            lost += int(np.count_nonzero(steps.loss_mask_N[stop : segment.stop]))
            if steps.token_rewards_N is not None:
                reward += float(steps.token_rewards_N[stop : segment.stop].sum(dtype=np.float64))
            if len(sampled := np.flatnonzero(steps.loss_mask_N[segment.start : stop])):
                place = position + int(sampled[-1])
        if stop > segment.start:
            kept.append(Segment(segment.start, stop, segment.live))
        position += segment.stop - segment.start
    row.segments = kept
    row.ends = {end for end in row.ends if end <= length}
    if reward:
        row.moved[place] = row.moved.get(place, 0.0) + reward
    return lost
