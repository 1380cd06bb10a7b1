"""Finds why a run may not learn: compares the metrics of its last optimizer steps with thresholds, and lists the
likeliest causes first.

Causes come before their effects: if every response is cut, no reward is given, so no group has variance and the
gradient is zero; the cut is named first. `docs/not-learning.md` has remedies for each symptom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

WINDOW = 5
"""Number of last optimizer steps over which a metric is averaged. If a run has fewer, no metric is compared."""


class Is(StrEnum):
    """How a metric compares with its threshold."""

    AT_LEAST = "at least"
    AT_MOST = "at most"
    FALLEN_TO = "fallen to"
    """The metric is at most `threshold` times its mean over the first optimizer steps of the run."""


class Symptom(NamedTuple):
    """A reason why a run does not learn, and the metric and the threshold that show it."""

    name: str
    """Name of the symptom, and of its section in `docs/not-learning.md`."""
    key: str
    comparison: Is
    threshold: float
    says: str
    """A sentence with a placeholder for the metric's value."""


SYMPTOMS = (
    Symptom("learning-rate", "policy/policy_lr", Is.AT_MOST, 1e-9, "the learning rate is {:.1g}"),
    Symptom(
        "engine-and-trainer", "policy/by_staleness/0/kl", Is.AT_LEAST, 0.01, "engine and trainer: {:.2g} nats apart"
    ),
    Symptom("always-solved", "reward/groups_all_one", Is.AT_LEAST, 0.8, "in {:.0%} of the groups all samples got 1"),
    Symptom("entropy", "policy/policy_entropy", Is.FALLEN_TO, 0.1, "the entropy fell to {:.0%} of the first steps'"),
    Symptom("too-short", "generate/avg_response_length", Is.AT_MOST, 1.5, "a response has {:.1f} tokens on average"),
    Symptom("shorter", "generate/avg_response_length", Is.FALLEN_TO, 0.2, "responses shrank to {:.0%} of the first"),
    Symptom("cut", "generate/truncated_ratio", Is.AT_LEAST, 0.5, "{:.0%} of the responses reach the length limit"),
    Symptom("never-solved", "reward/groups_all_zero", Is.AT_LEAST, 0.8, "in {:.0%} of the groups all samples got 0"),
    Symptom("no-variance", "reward/groups_without_variance", Is.AT_LEAST, 0.8, "{:.0%} of the groups have no variance"),
    Symptom("stale", "policy/policy_kl", Is.AT_LEAST, 0.1, "sampled and trained policy differ by {:.2g} nats"),
    Symptom("clipped", "policy/loss_metrics/clip_ratio", Is.AT_LEAST, 0.3, "{:.0%} of the loss tokens are clipped"),
    Symptom("no-gradient", "policy/grad_norm", Is.AT_MOST, 1e-8, "the gradient's norm is {:.1g}"),
)


class Diagnosis:
    """Compares the metrics of a run's last optimizer steps (lines of `metrics.jsonl`) with the thresholds."""

    def __init__(self, lines: Sequence[Mapping[str, float]] = ()) -> None:
        self._first: list[Mapping[str, float]] = [*lines[:WINDOW]]
        self._last = deque(lines, maxlen=WINDOW)

    def stepped(self, line: Mapping[str, float]) -> None:
        """Store the metrics of the next optimizer step: its line of `metrics.jsonl`."""
        self._last.append(line)
        if len(self._first) < WINDOW:
            self._first.append(line)

    def found(self) -> dict[str, str]:
        """The symptoms of the last optimizer steps: a description of each, by the symptom's name, the most likely cause
        first."""
        found = {}
        for name, key, comparison, threshold, says in SYMPTOMS:
            value = _mean(self._last, key)
            if value is not None and comparison is Is.FALLEN_TO:
                first = _mean(self._first, key)
                value = value / first if first else None
            if value is not None and (value >= threshold if comparison is Is.AT_LEAST else value <= threshold):
                found[name] = says.format(value)
        return found


def in_words(found: Mapping[str, str]) -> str:
    """The first symptom as a sentence, and the names of the other symptoms; empty without symptoms."""
    if not found:
        return ""
    first, *others = found
    also = f"; also: {', '.join(others)}" if others else ""
    return f"{found[first]} (docs/not-learning.md#{first}){also}"


def _mean(lines: Iterable[Mapping[str, float]], key: str) -> float | None:
    """The mean of a metric; None if fewer than `WINDOW` lines have it."""
    values = [line[key] for line in lines if line.get(key) is not None]
    return sum(values) / len(values) if len(values) == WINDOW else None
