"""Whom training favours: lengths of generated and of trained trajectories, and how far apart they are.

A trajectory of n sampled tokens falls into bucket `n.bit_length()`: 0 | 1 | 2 3 | 4 .. 7 | 8 .. 15 | ..
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import accumulate

BUCKETS = 33


def _zeros() -> list[int]:
    return [0] * BUCKETS


@dataclass(slots=True)
class Lengths:
    """Counts by bucket of length."""

    generated: list[int] = field(default_factory=_zeros)
    """Trajectories that were completed."""
    trained: list[int] = field(default_factory=_zeros)
    """Trajectories that an optimizer step used."""
    given_up: list[int] = field(default_factory=_zeros)
    """Trajectories that their group went on without."""
    generated_tokens: list[int] = field(default_factory=_zeros)
    """Sampled tokens of the generated trajectories."""
    loss_tokens: list[int] = field(default_factory=_zeros)
    """Tokens of the trained trajectories that carried loss."""

    def note_generated(self, tokens: int) -> None:
        """A trajectory was completed."""
        self.generated[bucket(tokens)] += 1
        self.generated_tokens[bucket(tokens)] += tokens

    def note_trained(self, lengths: Iterable[int], losses: Iterable[int], times: int = 1) -> None:
        """Trajectories were used, or with `times` -1 their use was undone."""
        for tokens, loss in zip(lengths, losses, strict=True):
            self.trained[bucket(tokens)] += times
            self.loss_tokens[bucket(tokens)] += times * loss

    def note_given_up(self, tokens: int) -> None:
        """A trajectory was cut off after so many tokens."""
        self.given_up[bucket(tokens)] += 1

    def export(self) -> dict[str, list[int]]:
        """The counts by name, without the empty buckets at the end: `[5, 1, 2]` is 5 of 0, 1 of 1, 2 of 2 to 3."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        used = max((place + 1 for of in counts.values() for place, count in enumerate(of) if count), default=0)
        return {name: of[:used] for name, of in counts.items()}

    def trajectory_distance(self) -> float:
        """How far trained lengths are from generated ones."""
        return distance(self.generated, self.trained)

    def token_distance(self) -> float:
        """The same over tokens: those that carried loss against those that were sampled."""
        return distance(self.generated_tokens, self.loss_tokens)


def bucket(tokens: int) -> int:
    """The bucket of a length."""
    return min(tokens.bit_length(), BUCKETS - 1)


def distance(a: list[int], b: list[int]) -> float:
    """Largest difference of two histograms' distribution functions, 0 (alike) to 1; 0 while one is empty.

    >>> distance([1, 1, 2], [0, 1, 1])
    0.25
    """
    if not sum(a) or not sum(b):
        return 0.0
    below = zip(accumulate(a), accumulate(b), strict=True)
    return max(abs(x / sum(a) - y / sum(b)) for x, y in below)
