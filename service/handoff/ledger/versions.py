"""Published policy versions, and the staleness of tokens.

published:  (0,0) (0,1) (0,2) (0,3)      then the trainer goes back to step 1 as incarnation 1
                     \\__ (1,1) (1,2)
staleness at (1,2):  of a (0,1) token 1; of (1,2) 0; of an abandoned (0,3) token 1, of an abandoned (0,2) token 1

The trainer repeats the undone steps on the same groups, so the weights of an abandoned version are close to the
weights of the repeated version of the same step. The staleness of the abandoned version's tokens is the number of steps
since that step, but at least 1, because the weights are not exactly the same.
"""

from __future__ import annotations

import numpy as np

from service.columns import changes
from service.types import NO_VERSION, Bools, Int32s, Int64s, PolicyVersion


class VersionHistory:
    """All published versions, and the steps from which each new trainer incarnation continued."""

    def __init__(self, start: PolicyVersion | None = None) -> None:
        self.published: dict[int, PolicyVersion] = {}
        """Every published version, oldest first, by its packed number, which tokens carry."""
        self._branches: list[tuple[int, int]] = []  # (the incarnation that began, the step that it went back to)
        self._note(start or PolicyVersion(0, 0))

    def publish(self, version: PolicyVersion) -> None:
        """Add a published version; raises a ValueError if `version` is not newer than the current version."""
        if version <= self.current:
            raise ValueError(f"version {version} does not follow {self.current}")
        self._note(version)

    def rollback(self, to_step: int) -> int:
        """Record that a new incarnation of the trainer continues from the earlier step `to_step`; returns the number of
        the incarnation."""
        if to_step > self.current.step:
            raise ValueError(f"cannot go back to step {to_step} from {self.current}")
        incarnation = self.current.incarnation + 1
        self._branches.append((incarnation, to_step))
        self._note(PolicyVersion(incarnation, to_step))
        return incarnation

    def known(self, versions_N: Int64s) -> Bools:
        """[N] whether each token's version was published."""
        heads = np.flatnonzero(changes(versions_N))  # equal versions are adjacent
        known_H = np.array([number in self.published for number in versions_N[heads].tolist()], np.bool_)
        return np.repeat(known_H, np.diff(np.append(heads, len(versions_N))))

    def staleness(self, versions_N: Int64s, at: PolicyVersion) -> Int32s:
        """[N] the staleness of each token at version `at`, in optimizer steps; -1 for tokens that no policy sampled."""
        step_N = np.ascontiguousarray(versions_N, "<i8").view("<i4")[::2]  # the low half; -1 for NO_VERSION
        stale_N = np.int32(at.step) - step_N
        for incarnation, common in self._branches:
            if incarnation <= at.incarnation:
                abandoned_N = (versions_N < incarnation << 32) & (step_N > common)
                stale_N = np.where(abandoned_N, np.maximum(np.abs(stale_N), 1), stale_N)
        stale_N |= step_N >> 31  # -1 where the step is negative, else unchanged
        return stale_N

    def _note(self, version: PolicyVersion) -> None:
        self.current = version
        """The newest published version."""
        self.published[version.pack()] = version


def version_of(number: int) -> PolicyVersion | None:
    """The version that this number packs; None for NO_VERSION, which marks tokens that no policy sampled."""
    return None if number == NO_VERSION else PolicyVersion.unpack(number)
