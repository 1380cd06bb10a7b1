"""Divides the time of a run among its parts, from the actors' measurements of the last minutes.

    the driver's time   trainer, weights, journal, checkpoint, evaluation, and the wait for a mini-batch
    its wait            for scorers, as the buffer measured it; the rest in proportion to the measured
                        seconds of trajectories (engines, environment, weights, journal)

The part with the largest share binds the run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from service.observe.pushed import Pushed
from service.observe.summary import duration

WINDOW_SECONDS = 600.0
"""Seconds in the window of alerts. A brief bottleneck, such as an evaluation, must not cause an alert."""
NOW_SECONDS = 40.0
"""Minimum seconds in the window of the status. With long optimizer steps the window is longer."""
SAMPLE_SECONDS = 10.0
MIN_STEPS = 3
"""Minimum number of optimizer steps in a window."""
SYNCS_OF_GROUP = 3.0
"""Number of journal syncs for which each trajectory waits, in addition to its own time. A group's claim comes, on
average, in the middle of a sync: it waits for half a sync and the whole next sync. The group's end waits for as
long."""
WAITING, SCORERS = "waiting", "scorers"
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
"""The part of the run to which each part of a trajectory's time counts. (An agent's own work is environment.)"""
STATE, SECONDS, STEPS = "baton_state_seconds_total", "baton_trajectory_seconds", "baton_optimizer_steps_total"
SYNCS = "baton_journal_syncs_total"

Totals = dict[tuple[str, str, str], float]
"""The actors' counts since they started, by metric, actor (`role/ident`) and label."""


Shares = dict[str, Any]
"""What binds a run in a window. `shares`: the fraction of the driver's time by part, the largest first. `part`: the
first of these parts. `idle`: the fraction of the generators' time without a group. `sentence`: all this in words."""


def bound_by(grown: Totals, seconds: float) -> Shares | None:
    """Divide the time of a window of `seconds` among the parts; None if it has too few optimizer steps. `grown`: the
    increase of the totals over the window."""
    found = _sums(grown, STATE, "driver")
    total = found[WAITING] + sum(found[state] for state in STATES)
    if sum(_sums(grown, STEPS).values()) < MIN_STEPS or not total:
        return None
    shares: defaultdict[str, float] = defaultdict(float)
    for state, part in STATES.items():
        if found[state]:
            shares[part] += found[state] / total
    shares[SCORERS] = scored = min(_sums(grown, STATE, "buffer")[SCORERS], found[WAITING]) / total
    for part, share in _of_generation(grown).items():
        shares[part] += share * (found[WAITING] / total - scored)
    playing = _sums(grown, STATE, "generator")
    idle = playing.pop(WAITING, 0.0)
    whole = idle + sum(spent for state, spent in playing.items() if state not in ("starting", "evaluating"))
    idle = idle / whole if whole else 0.0
    largest_first = dict(sorted(shares.items(), key=lambda share: -share[1]))
    said = ", ".join(f"{part} {share:.0%}" for part, share in largest_first.items() if share >= 0.01)
    sentence = f"{said} of the last {duration(seconds)}; generators without a group {idle:.0%}"
    return {"part": next(iter(largest_first)), "shares": largest_first, "idle": idle, "sentence": sentence}


def _of_generation(grown: Totals) -> dict[str, float]:
    """The fraction of each part in the time of trajectories; they sum to 1."""
    parts: defaultdict[str, float] = defaultdict(float)
    for part, spent in _sums(grown, f"{SECONDS}_sum").items():
        parts[TRAJECTORY[part]] += spent
    if syncs := sum(_sums(grown, SYNCS).values()):
        played = max(_sums(grown, f"{SECONDS}_count").values(), default=0.0)
        parts["journal"] += SYNCS_OF_GROUP * played * _sums(grown, STATE, "buffer")["syncing"] / syncs
    if not sum(parts.values()):
        parts["engines"] = 1.0  # no trajectory has ended in the window
    whole = sum(parts.values())
    return {part: spent / whole for part, spent in parts.items()}


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
        if self._kept and now - self._kept[-1][0] < SAMPLE_SECONDS:
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
        self._kept.append((now, totals))

    def now(self) -> Shares | None:
        """The shares in the shortest window that ends now and has enough steps; None if no window has enough."""
        for at, totals in reversed(self._kept):
            if self._kept[-1][0] - at >= NOW_SECONDS and (found := self._since(at, totals)) is not None:
                return found
        return self.whole()

    def whole(self) -> Shares | None:
        """The shares in the whole window; None if it has too few steps."""
        return self._since(*self._kept[0]) if self._kept else None

    def _since(self, at: float, before: Totals) -> Shares | None:
        now, totals = self._kept[-1]
        # after an actor's restart its totals begin at 0 again
        grown = {key: value - (old if (old := before.get(key, 0.0)) <= value else 0.0) for key, value in totals.items()}
        return bound_by(grown, now - at)
