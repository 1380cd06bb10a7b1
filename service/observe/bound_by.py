"""Divides the time of a run among its parts, by what the actors measured in the last minutes.

    the driver's time   trainer, weights, journal, checkpoint, evaluation, and the wait for a mini-batch
    its wait            divided among the groups that were not ready: those that wait for a scorer, and those that are
                        played, in proportion to the measured seconds of their trajectories (engines, environment,
                        weights, journal)

The part with the largest share binds the run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from service.observe.pushed import Pushed
from service.observe.summary import duration

WINDOW_SECONDS = 600.0
"""The window of alerts, in seconds: a brief bottleneck, such as an evaluation, must not cause an alert."""
NOW_SECONDS = 40.0
"""Minimum length of the window of the status, in seconds; with long optimizer steps the window is longer."""
SAMPLE_SECONDS = 10.0
MIN_STEPS = 3
"""Minimum number of optimizer steps in a window."""
SYNCS_OF_GROUP = 3.0
"""Number of syncs of the journal for which each trajectory waits in addition to its own time. On average, the claim of
its group comes in the middle of a sync, so it waits for half a sync and for the whole next sync; the end of the group
waits for as long."""
WAITING = "waiting"
STATES = {
    "step": "trainer",
    "bookkeeping": "trainer",
    "commit": "journal",
    "weights": "weights",
    "checkpoint": "checkpoint",
    "evaluating": "evaluation",
}
"""The part of the run to which the time in each state of the driver counts."""
TRAJECTORY = {
    "queue": "engines",
    "prefill": "engines",
    "decode": "engines",
    "pause": "weights",
    "environment": "environment",
    "other": "environment",
}
"""The part of the run to which each part of a trajectory's time counts; an agent's own work counts as environment."""
STATE, SECONDS, STEPS = "baton_state_seconds_total", "baton_trajectory_seconds", "baton_optimizer_steps_total"
SYNCS, GROUPS = "baton_journal_syncs_total", "baton_buffer_groups"

Totals = dict[tuple[str, str, str], float]
"""What the actors counted since they started, by metric, actor (`role/ident`) and label."""


class BoundBy(NamedTuple):
    """The shares of the parts in a window."""

    shares: Mapping[str, float]
    """Fraction of the driver's time by part, the largest first; they sum to 1."""
    idle: float
    """Fraction of their time for which the generators had no group."""
    seconds: float
    """Length of the window."""

    def sentence(self) -> str:
        """The shares in one line.

        >>> BoundBy({"environment": 0.6, "trainer": 0.4, "journal": 0.0}, 0.1, 45.0).sentence()
        'environment 60%, trainer 40% of the last 45 s; generators without a group 10%'
        """
        shares = ", ".join(f"{part} {share:.0%}" for part, share in self.shares.items() if share >= 0.01)
        return f"{shares} of the last {duration(self.seconds)}; generators without a group {self.idle:.0%}"

    def report(self) -> dict[str, Any]:
        """The shares for the status document."""
        return {
            "part": next(iter(self.shares)),
            "shares": dict(self.shares),
            "idle": self.idle,
            "sentence": self.sentence(),
        }


def bound_by(grown: Totals, seconds: float) -> BoundBy | None:
    """Divide the time of a window among the parts; None if it has too few optimizer steps.

    `grown`: the increase of the totals over the window; the totals of `GROUPS` are in group-seconds.
    """
    found = _sums(grown, STATE, "driver")
    total = found[WAITING] + sum(found[state] for state in STATES)
    if sum(_sums(grown, STEPS).values()) < MIN_STEPS or not total:
        return None
    shares: defaultdict[str, float] = defaultdict(float)
    for state, part in STATES.items():
        if found[state]:
            shares[part] += found[state] / total
    for part, share in _of_generation(grown).items():
        shares[part] += share * found[WAITING] / total
    playing = _sums(grown, STATE, "generator")
    idle = playing.pop(WAITING, 0.0)
    whole = idle + sum(spent for state, spent in playing.items() if state not in ("starting", "evaluating"))
    largest_first = dict(sorted(shares.items(), key=lambda share: -share[1]))
    return BoundBy(largest_first, idle / whole if whole else 0.0, seconds)


def _of_generation(grown: Totals) -> dict[str, float]:
    """The fraction of each part in the time of the groups that were not ready; they sum to 1."""
    parts: defaultdict[str, float] = defaultdict(float)
    for part, spent in _sums(grown, f"{SECONDS}_sum").items():
        parts[TRAJECTORY[part]] += spent
    if syncs := sum(_sums(grown, SYNCS).values()):
        played = max(_sums(grown, f"{SECONDS}_count").values(), default=0.0)
        parts["journal"] += SYNCS_OF_GROUP * played * _sums(grown, STATE, "buffer")["syncing"] / syncs
    if not sum(parts.values()):
        parts["engines"] = 1.0  # no trajectory has ended in the window
    groups = _sums(grown, GROUPS)
    scoring, of = groups["scoring"], sum(groups[state] for state in ("issued", "open", "scoring"))
    scored = scoring / of if scoring else 0.0
    whole = sum(parts.values())
    return {part: (1 - scored) * spent / whole for part, spent in parts.items()} | {"scorers": scored}


def _sums(totals: Totals, metric: str, role: str = "") -> defaultdict[str, float]:
    """The totals of a metric by label, summed over the actors of the role."""
    found: defaultdict[str, float] = defaultdict(float)
    for (name, actor, label), value in totals.items():
        if name == metric and actor.startswith(role):
            found[label] += value
    return found


class Window:
    """The totals of the last ten minutes, one sample every ten seconds."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Totals]] = deque(maxlen=int(WINDOW_SECONDS / SAMPLE_SECONDS) + 1)

    def sample(self, now: float, actors: Iterable[Pushed]) -> None:
        """Store the totals of the actors' metrics, if the last sample is old enough; `now` in seconds."""
        before, kept = self._kept[-1] if self._kept else (now, {})
        if self._kept and now - before < SAMPLE_SECONDS:
            return
        totals: Totals = {}
        for pushed in actors:
            actor = f"{pushed.role}/{pushed.ident}"
            for state, seconds in pushed.by_label(STATE, "state").items():
                totals[STATE, actor, state] = seconds
            for of in ("_sum", "_count"):
                for part, value in pushed.by_label(SECONDS, "part", of).items():
                    totals[SECONDS + of, actor, part] = value
            for metric in (STEPS, SYNCS):
                totals[metric, actor, ""] = pushed.total(metric)
            for state, n in pushed.by_label(GROUPS, "state").items():
                totals[GROUPS, actor, state] = kept.get((GROUPS, actor, state), 0.0) + n * (now - before)
        self._kept.append((now, totals))

    def now(self) -> BoundBy | None:
        """The shares in the shortest window that ends now and has enough steps; None if no window has enough."""
        for at, totals in reversed(self._kept):
            if self._kept[-1][0] - at >= NOW_SECONDS and (found := self._since(at, totals)) is not None:
                return found
        return self.whole()

    def whole(self) -> BoundBy | None:
        """The shares in the whole window; None if it has too few steps."""
        return self._since(*self._kept[0]) if self._kept else None

    def _since(self, at: float, before: Totals) -> BoundBy | None:
        now, totals = self._kept[-1]
        # the totals of an actor that restarted in the window begin again
        grown = {key: value - (old if (old := before.get(key, 0.0)) <= value else 0.0) for key, value in totals.items()}
        return bound_by(grown, now - at)
