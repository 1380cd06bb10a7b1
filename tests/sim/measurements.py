"""Measurements by the generators and the trainer of a simulation, and the report of the measurements."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from service.types import MiniBatch, PolicyVersion, TrajectoryId


class Measurements:
    """Counts of a simulated run, measured outside of the buffer."""

    def __init__(self) -> None:
        self.committed_at: list[float] = []
        """Time of each commit, in order."""
        self.wait_seconds: list[float] = []
        """Seconds that the trainer waited for each mini-batch."""
        self.staleness: Counter[int] = Counter()
        """Number of sampled tokens of trained mini-batches, by staleness."""
        self.generated: dict[TrajectoryId, int] = {}
        """Number of sampled tokens of each trajectory that was begun."""
        self.trained: dict[int, int] = {}
        """The optimizer step that used each group, by group_id; steps that a restart of the trainer undid are left
        out."""

    def leased(self, batch: MiniBatch, version: PolicyVersion, waited: float) -> None:
        """Record that the trainer, at policy version `version`, received a mini-batch, for which it had waited `waited`
        seconds."""
        self.wait_seconds.append(waited)
        for micro_batch in (m for rank in batch.ranks for m in rank):
            ages_N = micro_batch.staleness_N[micro_batch.staleness_N >= 0]
            self.staleness.update(dict(zip(*(a.tolist() for a in np.unique(ages_N, return_counts=True)), strict=True)))

    def committed(self, version: PolicyVersion, batch: MiniBatch, now: float) -> None:
        """Record that the buffer has confirmed the commit of a mini-batch, with the new policy version `version`."""
        self.committed_at.append(now)
        self.trained.update(dict.fromkeys(batch.groups, version.step))

    def went_back(self, step: int) -> None:
        """Record that a trainer started from the checkpoint of optimizer step `step`; later steps are undone."""
        self.trained = {group_id: used for group_id, used in self.trained.items() if used <= step}


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one simulated run, its start included."""

    steps_per_second: float
    tokens_per_second: float
    """Sampled tokens of trained mini-batches, per second."""
    trainer_wait: float
    """Fraction of the time in which the trainer waited for a mini-batch."""
    generator_wait: float
    """Fraction of the time for which a slot has no group, averaged over the slots."""
    staleness_mean: float
    """Mean staleness, in versions, of all sampled tokens of trained mini-batches."""
    staleness_p99: int
    staleness_max: int
    beyond: float
    """Fraction of the sampled tokens of trained mini-batches that were staler than `max_staleness` and had no loss."""
    length_distance: float
    """Largest difference between the distributions of generated and trained lengths, 0 to 1."""


def distance(a: np.typing.NDArray[np.int64], b: np.typing.NDArray[np.int64]) -> float:
    """The largest difference between two samples' distribution functions (Kolmogorov-Smirnov)."""
    both = np.sort(np.concatenate((a, b)))
    below = [np.searchsorted(np.sort(x), both, side="right") / len(x) for x in (a, b)]
    return float(np.abs(below[0] - below[1]).max())
