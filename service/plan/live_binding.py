"""Finds the current bottleneck of a run from the times measured in the last minutes, by the rules of
`service.plan.binding`.

generation: the seconds in which generators play groups, divided among ENGINES, WEIGHTS and ENVIRONMENT in proportion
            to the measured times of the trajectories. JOURNAL is added: the time for which claims and the ends of
            groups wait until the journal is synced, as estimated from the mean time of a sync
training:   the seconds of the driver in each of its states, except the state in which it waits for a mini-batch
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from service.observe.hub import Pushed
from service.observe.summary import duration
from service.plan.binding import Binding, Demand, Part, binding

WINDOW_SECONDS = 600.0
"""The window of alerts, in seconds: a brief bottleneck, such as an evaluation, must not cause an alert."""
NOW_SECONDS = 40.0
"""Minimum length of the window of the status, in seconds. It is short, so that a part that becomes slow is named within
a minute; if optimizer steps are long, the window is longer."""
SAMPLE_SECONDS = 10.0
MIN_STEPS = 3
"""Minimum number of optimizer steps in the window for which a bottleneck is named."""
SLOW = 0.6
"""An engine that samples less than this fraction of the others' tokens per second is reported as slow."""
WAITING = "waiting"
IDLE = (WAITING, "starting", "evaluating")
"""States in which a generator plays no group for training."""
SYNCS_OF_GROUP = 3.0
"""Number of syncs of the journal for which each trajectory waits in addition to its own time. On average, the claim of
its group comes in the middle of a sync, so it waits for half a sync and for the whole next sync; the end of the group
waits for as long."""
STATES = {
    "step": Part.TRAINER,
    "bookkeeping": Part.TRAINER,
    "commit": Part.JOURNAL,
    "weights": Part.WEIGHTS,
    "checkpoint": Part.CHECKPOINT,
    "evaluating": Part.EVALUATION,
}
"""The part of the run to which the time in each state of the driver counts."""
PARTS = {
    "queue": Part.ENGINES,
    "prefill": Part.ENGINES,
    "decode": Part.ENGINES,
    "pause": Part.WEIGHTS,
    "environment": Part.ENVIRONMENT,
    "other": Part.ENVIRONMENT,
}
"""The part of the run to which each part of a trajectory's time counts; an agent's own work counts as environment."""


@dataclass(frozen=True)
class Figures:
    """Measured times and counts of a run: totals since the run's start, or the increase of the totals over a window."""

    at: float
    """Time at which the totals were read, in seconds of a monotonic clock; for an increase, the window's length in
    seconds."""
    steps: float = 0.0
    trainer: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the driver in each of its states."""
    engines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds of each generator in each of its states."""
    ranks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds of each rank in each of its states."""
    trajectories: Mapping[str, float] = field(default_factory=dict)
    """Seconds of all trajectories, by part of their time."""
    tokens: Mapping[str, float] = field(default_factory=dict)
    """Number of tokens that each generator sampled."""
    played: float = 0.0
    """Number of trajectories that were played."""
    syncing: float = 0.0
    """Seconds that all syncs of the journal took together."""
    syncs: float = 0.0
    arriving: float = 0.0
    """Sum over all weight updates: seconds from sending the weights until the engines serve them."""

    def since(self, before: Figures) -> Figures:
        """The increase of the totals from `before` to this object; if an actor restarted in between, its totals since
        the restart."""
        return Figures(**{name: _grown(getattr(self, name), getattr(before, name)) for name in vars(self)})


class Limits(NamedTuple):
    """The settings of a run on which its bottleneck depends, such as how far generation may run ahead of training."""

    ranks: int = 1
    lookahead: float = 2.0
    concurrency: float = 1.0
    """Number of groups that are generated at once, divided by the groups of a mini-batch."""
    shares_cores: bool = False

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> Limits:
        """Read these settings from `run`, the driver's status report."""
        ahead = run.get("concurrent_groups", 1) / run.get("mini_batch_size", 1)
        return cls(run.get("ranks", 1), run.get("lookahead", 2), ahead, run.get("shares_cores", False))


def _grown(now: Any, before: Any) -> Any:
    if not isinstance(now, Mapping):
        return max(0.0, now - before)
    if any(isinstance(states, Mapping) for states in now.values()):
        return {name: _grown(states, before.get(name, {})) for name, states in now.items()}
    grown = {name: value - before.get(name, 0.0) for name, value in now.items()}
    return dict(now) if any(value < 0 for value in grown.values()) else grown


def demand(grown: Figures, limits: Limits) -> Demand | None:
    """The seconds per optimizer step that each part needed, computed from `grown`, the increase of the totals over a
    window; None if there is too little data."""
    if grown.steps < MIN_STEPS or not grown.engines or grown.at <= 0:
        return None
    playing = sum(
        seconds for states in grown.engines.values() for state, seconds in states.items() if state not in IDLE
    ) / len(grown.engines)
    whole = sum(grown.trajectories.values())
    waited = SYNCS_OF_GROUP * grown.played * grown.syncing / grown.syncs if grown.syncs else 0.0
    generation = {Part.ENGINES: 0.0, Part.JOURNAL: playing * waited / whole / grown.steps if whole else 0.0}
    for part, seconds in grown.trajectories.items():
        share = seconds / whole if whole else 0.0
        generation[PARTS[part]] = generation.get(PARTS[part], 0.0) + playing * share / grown.steps
    training = {Part.TRAINER: 0.0}
    for state, seconds in grown.trainer.items():
        if (needs := STATES.get(state)) is not None:
            training[needs] = training.get(needs, 0.0) + seconds / grown.steps
    # neither the start nor the end of the run is part of an optimizer step
    of_step = sum(seconds for state, seconds in grown.trainer.items() if state in (*STATES, WAITING)) / grown.steps
    return Demand(generation, training, len(grown.engines), *limits, grown.arriving / grown.steps, of_step)


class Live(NamedTuple):
    """The current bottleneck of a run."""

    found: Binding
    seconds: float
    """Length of the window that was measured, in seconds."""
    slow: str
    """A text about an engine or rank that is slower than the others; empty if there is none."""

    def sentence(self) -> str:
        """A description of the bottleneck in one line."""
        slow = f"; {self.slow}" if self.slow else ""
        return f"{self.found.sentence()}{slow} (last {duration(self.seconds)})"


def live(grown: Figures, limits: Limits) -> Live | None:
    """The bottleneck in a window, found from `grown`, the increase of the totals over the window; None if there is too
    little data."""
    needed = demand(grown, limits)
    if needed is None:
        return None
    slow = {Part.ENGINES: _slow_engine(grown), Part.TRAINER: _slow_rank(grown)}
    found = binding(needed, next((part for part, who in slow.items() if who), None))
    return Live(found, grown.at, slow.get(found.part, ""))


def _slow_engine(grown: Figures) -> str:
    """A text about the engine that samples far fewer tokens per second of generation than the others; empty if there is
    none."""
    rates = {
        name: grown.tokens.get(name, 0.0) / states["generating"]
        for name, states in grown.engines.items()
        if states.get("generating", 0.0) > 0
    }
    for name, rate, usual in _beside_others(rates):
        if rate < SLOW * usual:
            return f"{name} samples {rate:,.0f} tokens a second, others {usual:,.0f}"
    return ""


def _slow_rank(grown: Figures) -> str:
    """A text about the rank that computes far longer per optimizer step than the others; empty if there is none, or if
    the other ranks wait for it in their computation and so take as long."""
    busy = {
        name: (states.get("forward_backward", 0.0) + states.get("optimizer", 0.0)) / grown.steps
        for name, states in grown.ranks.items()
    }
    for name, seconds, usual in _beside_others(busy):
        if seconds * SLOW > usual:
            return f"{name} computes {seconds:.2f} s a step, others {usual:.2f} s"
    return ""


def _beside_others(values: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """Yield (name, value, median of the other values) for each entry; nothing for a single entry."""
    for name, value in values.items():
        if others := [other for each, other in values.items() if each != name]:
            yield name, value, median(others)


def figures_of(now: float, actors: Iterable[Pushed]) -> Figures:
    """The totals at the time `now`, computed from the metrics that the actors have pushed."""
    by_role: dict[str, dict[str, Mapping[str, float]]] = {"driver": {}, "buffer": {}, "generator": {}, "trainer": {}}
    trajectories: Counter[str] = Counter()
    steps = played = syncs = arriving = 0.0
    tokens: dict[str, float] = {}
    for pushed in actors:
        if states := pushed.by_label("baton_state_seconds_total", "state"):
            by_role.setdefault(pushed.role, {})[pushed.ident] = states
        trajectories.update(pushed.by_label("baton_trajectory_seconds", "part", "_sum"))
        played += max(pushed.by_label("baton_trajectory_seconds", "part", "_count").values(), default=0.0)
        if pushed.role == "generator":
            tokens[pushed.ident] = pushed.total("baton_generated_tokens_total")
        elif pushed.role == "driver":
            steps = pushed.total("baton_optimizer_steps_total")
            arriving = pushed.by_label("baton_weight_sync_seconds", "role", "_sum").get("driver", 0.0)
        elif pushed.role == "buffer":
            syncs = pushed.total("baton_journal_syncs_total")
    trainer, syncing = by_role["driver"].get("driver", {}), by_role["buffer"].get("buffer", {}).get("syncing", 0.0)
    return Figures(
        now, steps, trainer, by_role["generator"], by_role["trainer"], trajectories, tokens, played, syncing, syncs,
        arriving,
    )  # fmt: skip


class Window:
    """The totals of the last ten minutes, one sample every ten seconds."""

    def __init__(self) -> None:
        self._kept: deque[Figures] = deque(maxlen=int(WINDOW_SECONDS / SAMPLE_SECONDS) + 1)

    def sample(self, now: float, actors: Iterable[Pushed]) -> None:
        """Store the totals of the actors' metrics, if the last sample is old enough."""
        if not self._kept or now - self._kept[-1].at >= SAMPLE_SECONDS:
            self.add(figures_of(now, actors))

    def add(self, figures: Figures) -> None:
        """Store a sample of the totals."""
        self._kept.append(figures)

    def waits(self, run: Mapping[str, Any]) -> tuple[str, float] | None:
        """The name of the slowest part over the whole window, and the fraction of the time for which generation or
        training waited for it; the fraction is 0 if the part is no bottleneck.

        None: there is too little data.
        """
        whole = self.live(Limits.of(run))
        return None if whole is None else (str(whole.found.part), whole.found.waits * whole.found.is_bottleneck)

    def report(self, run: Mapping[str, Any]) -> dict[str, Any] | None:
        """The current bottleneck, for the status document: its `part`, whether it is a `usual` one (engines or
        trainer), the fraction of time for which the other side `waits`, and a `sentence`; None if there is too little
        data."""
        if (now := self.now(Limits.of(run))) is None:
            return None
        found = now.found
        return {"part": str(found.part), "usual": found.is_usual, "waits": found.waits, "sentence": now.sentence()}

    def live(self, limits: Limits) -> Live | None:
        """The bottleneck of the whole window; None if there is too little data."""
        return live(self._kept[-1].since(self._kept[0]), limits) if len(self._kept) > 1 else None

    def now(self, limits: Limits) -> Live | None:
        """The bottleneck of the shortest window that ends now and has enough data; None if no window has enough."""
        for before in reversed(self._kept):
            grown = self._kept[-1].since(before)
            if grown.at >= NOW_SECONDS and grown.steps >= MIN_STEPS:
                return live(grown, limits)
        return self.live(limits)
