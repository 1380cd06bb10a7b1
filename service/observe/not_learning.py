"""Why a run may not learn: figures of its last steps against thresholds, in the order in which one looks.

Causes come before their effects: where every response is cut no reward is given, so no group has variance and the
gradient is zero; what is named first is the cut. `docs/not-learning.md` says what to try for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

WINDOW = 5
"""Steps over which a figure is averaged, and fewest steps after which it is judged."""

Line = Mapping[str, float]
"""A line of `metrics.jsonl`."""


class Comparison(StrEnum):
    """How a figure is compared with its threshold."""

    AT_LEAST = "at least"
    AT_MOST = "at most"
    FALLEN_TO = "fallen to"
    """At most this fraction of its mean over the first steps of the run."""


class Symptom(NamedTuple):
    """A figure that shows why a run does not learn."""

    name: str
    """The section of `docs/not-learning.md`."""
    key: str
    comparison: Comparison
    threshold: float
    says: str
    """A sentence with the figure as `value`."""


SYMPTOMS = (
    Symptom("learning-rate", "policy/policy_lr", Comparison.AT_MOST, 1e-9, "the learning rate is {value:.1g}"),
    Symptom(
        "engine-and-trainer",
        "policy/by_staleness/0/kl",
        Comparison.AT_LEAST,
        0.01,
        "engine and trainer disagree about the newest policy (divergence {value:.2g} nats)",
    ),
    Symptom(
        "always-solved",
        "reward/groups_all_one",
        Comparison.AT_LEAST,
        0.8,
        "in {value:.0%} of the groups every sample got reward 1",
    ),
    Symptom(
        "entropy",
        "policy/policy_entropy",
        Comparison.FALLEN_TO,
        0.1,
        "the policy hardly varies: its entropy is {value:.0%} of that of the first steps",
    ),
    Symptom(
        "too-short",
        "generate/avg_response_length",
        Comparison.AT_MOST,
        1.5,
        "a response has {value:.1f} tokens on average",
    ),
    Symptom(
        "shorter",
        "generate/avg_response_length",
        Comparison.FALLEN_TO,
        0.2,
        "responses have {value:.0%} of their length in the first steps",
    ),
    Symptom(
        "cut",
        "generate/truncated_ratio",
        Comparison.AT_LEAST,
        0.5,
        "{value:.0%} of the responses were cut at generator.max_generate_length",
    ),
    Symptom(
        "never-solved",
        "reward/groups_all_zero",
        Comparison.AT_LEAST,
        0.8,
        "in {value:.0%} of the groups every sample got reward 0",
    ),
    Symptom(
        "no-variance",
        "reward/groups_without_variance",
        Comparison.AT_LEAST,
        0.8,
        "in {value:.0%} of the groups all samples got the same reward",
    ),
    Symptom(
        "stale",
        "policy/policy_kl",
        Comparison.AT_LEAST,
        0.1,
        "the tokens are of another policy than the trained one (divergence {value:.2g} nats)",
    ),
    Symptom(
        "clipped",
        "policy/loss_metrics/clip_ratio",
        Comparison.AT_LEAST,
        0.3,
        "{value:.0%} of the loss tokens are clipped",
    ),
    Symptom("no-gradient", "policy/grad_norm", Comparison.AT_MOST, 1e-8, "the gradient's norm is {value:.1g}"),
)


class Diagnosis:
    """Compares the figures of a run's last steps with the thresholds."""

    def __init__(self) -> None:
        self._first: list[Line] = []
        self._last: deque[Line] = deque(maxlen=WINDOW)

    def stepped(self, line: Line) -> None:
        """Take the line of the next step."""
        self._last.append(line)
        if len(self._first) < WINDOW:
            self._first.append(line)

    def found(self) -> list[tuple[Symptom, float]]:
        """The symptoms of the last steps with their figures, the most likely cause first."""
        measured = ((symptom, self._value(symptom)) for symptom in SYMPTOMS)
        return [(symptom, value) for symptom, value in measured if value is not None and _shows(symptom, value)]

    def _value(self, symptom: Symptom) -> float | None:
        last = _mean(self._last, symptom.key)
        if last is None or symptom.comparison is not Comparison.FALLEN_TO:
            return last
        first = _mean(self._first, symptom.key)
        return last / first if first else None


def in_words(found: Sequence[tuple[Symptom, float]]) -> str:
    """The first symptom as a sentence, and the names of the others; empty without any."""
    if not found:
        return ""
    (first, value), *others = found
    also = f"; also: {', '.join(symptom.name for symptom, _ in others)}" if others else ""
    return f"{first.says.format(value=value)} (docs/not-learning.md#{first.name}){also}"


def _mean(lines: Sequence[Line] | deque[Line], key: str) -> float | None:
    """The mean of a figure; None if fewer than `WINDOW` lines have it."""
    values = [line[key] for line in lines if line.get(key) is not None]
    return sum(values) / len(values) if len(values) == WINDOW else None


def _shows(symptom: Symptom, value: float) -> bool:
    return value >= symptom.threshold if symptom.comparison is Comparison.AT_LEAST else value <= symptom.threshold
