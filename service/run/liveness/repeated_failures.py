"""Reports how many trajectories fail and why, and ends a run in which all trajectories fail."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from service.errors import RunFailed
from service.handoff.steps.values import FAILURES

STARVING_SECONDS = 30.0
"""Seconds that the trainer waits for a mini-batch before failures are reported as the reason."""
MANY = 0.05
"""If at least this fraction of the trajectories fails, there is a warning."""
FEWEST = 3
"""Minimum number of failures for a warning."""
RECENT_STEPS = 5
REFUSED = "refused_"
"""Prefix of the reasons of refused messages. It distinguishes them from the reasons for which trajectories end."""

Statuses = Sequence[Mapping[str, Any]]
"""The status of each generator."""


class FailureWatch:
    """Counts the trajectories that ended since the last optimizer step, by the reason of their end, and the messages
    that the buffer refused."""

    def __init__(self, limit: int, say: Callable[[str], None], report: Callable[[str], None]) -> None:
        """`limit`: the run is ended if at least this many trajectories ended since the last optimizer step, and all of
        them failed; `say`: prints a line on the terminal; `report`: shows a text in the run's status."""
        self._limit = limit
        self._say, self._report = say, report
        self._said: set[str] = set()
        """Reasons of failures that were already printed."""
        self._before: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._recent: deque[Counter[str]] = deque(maxlen=RECENT_STEPS)
        """The counts of each of the last steps."""
        self.many = ""
        """What failed in the last steps, if there were many failures."""
        self._starving = False

    def stepped(self, statuses: Statuses) -> None:
        """Record that an optimizer step was taken. Warn if many trajectories failed in the last steps, and begin to
        count for the next step."""
        self._look(statuses)
        self._recent.append(self._now - self._before)
        self._before, self._starving = self._now, False
        recent = sum(self._recent, Counter[str]())
        lost = _lost(recent).total()
        many = lost >= max(FEWEST, MANY * _ended(recent).total())
        steps = "step" if len(self._recent) == 1 else f"{len(self._recent)} steps"
        text = f"in the last {steps} {_in_words(recent, statuses)}" if many else ""
        if text and not self.many:
            self._say(f"WARNING {text}")
        self.many = text
        self._report(text)

    def check(self, statuses: Statuses, waited: float = 0.0) -> None:
        """Print failures that have new reasons. After a long wait, print that failures are its reason. `waited`:
        seconds for which the trainer has waited for the next mini-batch.

        Raises:
            RunFailed: at least `limit` trajectories ended since the last optimizer step, and all of them failed.
        """
        self._look(statuses)
        # The counts of a restarted generator begin at 0; a negative difference counts as 0.
        since = self._now - self._before
        if waited >= STARVING_SECONDS and _lost(since):
            text = f"since the last step {_in_words(since, statuses)}"
            self._report(text)
            if not self._starving:
                self._say(f"the step has waited {waited:.0f} s for a mini-batch; {text}")
            self._starving = True
        ended = _ended(since)
        if ended.total() < self._limit or ended - _lost(since):
            return
        details = {why for status in statuses for why in status["failures"].values()}
        raise RunFailed(f"every trajectory since the last step failed ({_listed(ended)}): {'; '.join(sorted(details))}")

    def name_scorers(self, failures: Mapping[tuple[str, str], str]) -> None:
        """Print one line about the first failure of each scorer for each reason. `failures`: messages by scorer and
        reason."""
        for (scorer, reason), why in failures.items():
            if (key := f"{scorer}: {reason}") not in self._said:
                self._said.add(key)
                self._say(f"scorer {scorer} gave no good answer, the first time for this reason: {reason}: {why}")

    def _look(self, statuses: Statuses) -> None:
        """Count failures, and print one line for the first failure with each reason."""
        self._now = Counter()
        for status in statuses:
            ends = {name: n for name, n in status["counts"].items() if name.startswith("end_")}
            self._now.update({name.removeprefix("end_"): n for name, n in ends.items()})
            self._now.update({f"{REFUSED}{reason}": n for reason, n in status["refusals"].items()})
            for reason, why in status["failures"].items():
                if reason not in self._said:
                    self._said.add(reason)
                    self._say(f"a trajectory failed and starts again; first failure for this reason: {why}")


def _ended(counts: Counter[str]) -> Counter[str]:
    return Counter({reason: n for reason, n in counts.items() if not reason.startswith(REFUSED)})


def _lost(counts: Counter[str]) -> Counter[str]:
    return Counter({reason: n for reason, n in counts.items() if reason in FAILURES or reason.startswith(REFUSED)})


def _in_words(counts: Counter[str], statuses: Statuses) -> str:
    """How many trajectories failed, for which reasons, and the last failure with the most frequent reason."""
    lost = _lost(counts)
    last = [why for status in statuses if (why := status["failures"].get(lost.most_common(1)[0][0]))]
    text = f"{lost.total()} failures in {_ended(counts).total()} trajectories ({_listed(lost)})"
    return text + (f"; the last: {last[-1]}" if last else "")


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in counts.most_common())
