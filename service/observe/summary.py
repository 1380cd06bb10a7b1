"""The result of a run: the numbers of `summary.json`, and lines for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def learning_summary(rewards_S: Sequence[float], staleness_S: Sequence[float]) -> dict[str, float | None]:
    """Reward over the first and the last tenth of the steps, their difference, and the mean staleness.

    All are None before the first step.

    >>> learning_summary([0.0, 0.5, 1.0], [1.0, 1.0, 4.0])["reward_gain"]
    1.0
    """
    tenth = max(1, len(rewards_S) // 10)
    first, last = _mean(rewards_S[:tenth]), _mean(rewards_S[-tenth:])
    return {
        "reward_first_tenth": first,
        "reward_last_tenth": last,
        "reward_gain": None if first is None or last is None else last - first,
        "staleness_mean": _mean(staleness_S),
    }


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The summary for the terminal; a run that failed or was stopped early has fewer numbers."""
    if "reason" in summary:
        return [summary["state"], summary["reason"]]
    seconds = f", {summary['seconds']:.0f} s" if "seconds" in summary else ""
    lines = [f"{summary['state']} after {summary.get('steps', 0)} optimizer steps{seconds}"]
    if summary.get("reward_gain") is not None:
        lines.append(
            f"reward: {summary['reward_first_tenth']:.3f} over the first tenth of the steps, "
            f"{summary['reward_last_tenth']:.3f} over the last ({summary['reward_gain']:+.3f})"
        )
    if "trainer_wait_fraction" in summary:
        lines.append(
            f"waiting: the trainer {summary['trainer_wait_fraction']:.0%} of the time, "
            f"the generators {summary['generator_wait_fraction']:.0%}"
        )
    if "tokens" in summary:
        fates = ", ".join(f"{fate} {count}" for fate, count in summary["tokens"].items() if count)
        lines.append(f"tokens: {fates or 'none'}")
    return lines


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
