"""Which generator plays which unfinished sample, and what the unfinished ones may still bring.

Everything here costs the same however many samples are unfinished.
"""

from __future__ import annotations

from collections import OrderedDict

from service.handoff.ledger.state import Trajectory

Sample = tuple[int, int]
"""(group_id, sample)"""


class Holdings:
    """The unfinished samples: those that a generator plays, and the counts of these and of those that wait for one."""

    def __init__(self) -> None:
        self.since: OrderedDict[Sample, float] = OrderedDict()
        """When each sample that a generator plays last made progress, longest ago first."""
        self.count = 0
        """Unfinished samples, played or not."""
        self.n_bytes = 0
        """Bytes that their accepted steps are counted with."""
        self._of: dict[str, set[Sample]] = {}
        """By generator."""

    def of(self, generator: str) -> dict[int, list[int]]:
        """The unfinished samples that a generator plays, by group_id."""
        samples: dict[int, list[int]] = {}
        for group_id, sample in sorted(self._of.get(generator, ())):
            samples.setdefault(group_id, []).append(sample)
        return samples

    def begin(self, sample: Sample, trajectory: Trajectory, now: float) -> None:
        """The trajectory's generator plays it, unfinished, from now on; nothing where it has none."""
        if trajectory.generator is not None:
            self._of.setdefault(trajectory.generator, set()).add(sample)
            self.since[sample] = now

    def renew(self, sample: Sample, now: float) -> None:
        """A sample that a generator plays made progress."""
        self.since[sample] = now
        self.since.move_to_end(sample)

    def let_go(self, sample: Sample, trajectory: Trajectory) -> None:
        """The trajectory's generator plays it no more; nothing where none does."""
        if self.since.pop(sample, None) is None or trajectory.generator is None:
            return
        held = self._of[trajectory.generator]
        held.discard(sample)
        if not held:
            del self._of[trajectory.generator]

    def finish(self, sample: Sample, trajectory: Trajectory) -> None:
        """A sample is no longer unfinished."""
        self.let_go(sample, trajectory)
        self.count -= 1
        self.n_bytes -= trajectory.n_bytes
