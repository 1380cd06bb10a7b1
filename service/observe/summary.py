"""The result of a run: the numbers of `summary.json`, and lines for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

FEWEST_STEPS = 30
"""In a run with fewer optimizer steps, the reward's gain has no confidence interval: a tenth of the run would be one or
two steps."""

FATES_IN_WORDS = {"expired": "not finished in time or not needed", "stepped": "trained, in no checkpoint yet"}
"""Explanations of the less familiar fates of tokens."""


def learning_summary(rewards_S: Sequence[float], staleness_S: Sequence[float]) -> dict[str, Any]:
    """The mean reward over the first and over the last tenth of the optimizer steps, their difference with its 95 %
    interval, and the mean staleness.

    The interval is None below `FEWEST_STEPS`. Before the first step, all values are None.

    >>> learning_summary([0.0, 0.5, 1.0], [1.0, 1.0, 4.0])["reward_gain"]
    1.0
    """
    tenth = max(1, len(rewards_S) // 10)
    first, last = _mean(rewards_S[:tenth]), _mean(rewards_S[-tenth:])
    gain = None if first is None or last is None else last - first
    return {
        "reward_first_tenth": first,
        "reward_last_tenth": last,
        "reward_gain": gain,
        "reward_gain_interval": None if gain is None else _interval(gain, rewards_S, tenth),
        "staleness_mean": _mean(staleness_S),
    }


def _interval(gain: float, rewards_S: Sequence[float], tenth: int) -> list[float] | None:
    """The 95 % interval of the gain, from the noise of single steps.

    The noise is estimated from the differences of successive steps, which hardly contain the trend (von Neumann, 1941).
    """
    if len(rewards_S) < FEWEST_STEPS:
        return None
    squares = [(after - before) ** 2 / 2 for before, after in pairwise(rewards_S)]
    half = 1.96 * math.sqrt(2 * sum(squares) / len(squares) / tenth)
    return [gain - half, gain + half]


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The summary for the terminal; a run that failed or was stopped early has fewer numbers."""
    if "reason" in summary:
        return [summary["state"], summary["reason"]]
    seconds = f", {duration(summary['seconds'])}" if "seconds" in summary else ""
    lines = [f"{summary['state']} after {summary['steps']} optimizer steps{seconds}"]
    if summary.get("reward_gain") is not None:
        lines.append(
            f"reward: {summary['reward_first_tenth']:.3f} over the first tenth of the steps, "
            f"{summary['reward_last_tenth']:.3f} over the last ({summary['reward_gain']:+.3f}{_certainty(summary)})"
        )
    if summary.get("not_learning_mostly"):
        lines.append(f"learning: {summary['not_learning_mostly']}")
    if summary.get("not_learning"):
        lines.append(f"learning: at the end {summary['not_learning']}")
    if summary.get("failing"):
        lines.append(f"failing: {summary['failing']}")
    for name, of in summary.get("scorers", {}).items():
        if failures := sum(of["failures"].values()):
            lost = f"{of['refused']} groups refused and {of['fallbacks']} without it of {of['scored']} scored"
            lines.append(f"scorer {name}: {failures} failures, {lost}; the last: {of['last_failure']}")
    if restarts := summary.get("restarts"):
        lines.append(f"restarts: {', '.join(f'{name} {times}' for name, times in restarts.items())}")
    if cut := summary.get("sessions_cut"):
        lines.append(f"sessions of agents that were open and were cut: {cut}")
    if binding := summary.get("binding"):
        lines.append(f"bound by {binding['part']}: {binding['sentence']}")
    elif shares := summary.get("time"):
        parts = ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share >= 0.01)
        idle = f"generators without a group {summary['generator_wait_fraction']:.0%}"
        lines.append(f"bound by {summary['bound_by']}: {parts} of the steps' time; {idle}")
    if "tokens" in summary:
        lines.append(f"tokens: {fates_in_words(summary['tokens']) or 'none'}")
    return lines


def _certainty(summary: Mapping[str, Any]) -> str:
    if summary["steps"] < FEWEST_STEPS:
        return f"; {summary['steps']} steps are too few to tell, {FEWEST_STEPS} are enough"
    return "; 95% interval {:+.3f} to {:+.3f}".format(*summary["reward_gain_interval"])


def fates_in_words(tokens: Mapping[str, int]) -> str:
    """Tokens by fate, as text; less familiar fates have an explanation in brackets.

    >>> fates_in_words({"trained": 51200, "expired": 0, "stepped": 800})
    '51,200 trained, 800 stepped (trained, in no checkpoint yet)'
    """
    return ", ".join(
        f"{count:,} {fate.replace('_', ' ')}" + (f" ({FATES_IN_WORDS[fate]})" if fate in FATES_IN_WORDS else "")
        for fate, count in tokens.items()
        if count
    )


def duration(seconds: float) -> str:
    """A duration as text, in its two largest units.

    >>> duration(59.2), duration(220), duration(9000)
    ('59 s', '3 min 40 s', '2 h 30 min')
    """
    whole = max(0, round(seconds))
    if whole < 90:
        return f"{whole} s"
    minutes, hours = whole // 60, whole // 3600
    return f"{minutes} min {whole % 60} s" if hours == 0 else f"{hours} h {minutes % 60} min"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
