"""Pairs of deaths: who dies, when, and what is known of a run in which they died, simulated or real."""

import math
import re
from dataclasses import dataclass, field
from itertools import pairwise

VICTIMS = (
    "buffer",
    "trainer-0",
    "trainer-1",
    "generator-0",
    "engine",
    "scorer-judge-0",
    "agent worker",
    "metrics-hub",
    "connection",
)
"""`engine`: the engine core of generator-0; `connection`: the driver's with its actors."""
_RANK = re.compile(r"trainer-\d|the trainer\b")
NAMED = {"trainer-0": _RANK, "trainer-1": _RANK, "engine": re.compile("generator-0")}
NAMED |= {"scorer-judge-0": re.compile("scorer"), "metrics-hub": re.compile("metrics.hub")}
NAMED |= {"generator-0": re.compile("generator-0|the generators")}
NAMED |= {"connection": re.compile("contact|cannot be reached|unavailable|restarting: ")}
"""What names a victim in a line, where that is not its name; an actor whose connection was cut restarts."""
OUTSIDE = ("agent worker", "connection")
"""No actors: a run learns of their end only by what it waits for."""
MOMENTS = ("start", "lease", "step", "publication", "checkpoint", "end")
DELAYS = (0.0, 1.0, 4.0, 15.0)
CUT_SECONDS = 2.0
"""How long the driver has no connection."""
SILENCE_SECONDS = 30.0
"""For which a wait may outlast its cause without a line that names it."""
NAMING_SECONDS = 5.0
"""From a death to the line that names it, in 99 of 100."""


@dataclass(frozen=True)
class Pair:
    """Two deaths."""

    first: str
    second: str
    moment: str
    delay: float
    """Seconds from the first to the second."""

    @property
    def victims(self) -> tuple[str, str]:
        """Who dies."""
        return self.first, self.second

    def __str__(self) -> str:
        return f"{self.first} at {self.moment}, {self.second} {self.delay:g} s after"


@dataclass
class Told:
    """What is known of a run that ended, or hung."""

    ended: str = ""
    """`finished`, or why it did not finish."""
    seconds: float = 0.0
    """When it ended; all times are seconds since its beginning."""
    said: list[tuple[float, str]] = field(default_factory=list)
    deaths: list[tuple[float, str]] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    """Times of optimizer steps."""
    broken: list[str] = field(default_factory=list)
    """Promises that were broken."""

    def naming(self) -> list[tuple[str, float]]:
        """For each death of an actor the seconds to the first line that names it; infinite if none does, although
        the run went on for `NAMING_SECONDS`. Without its connections the driver has missed all actors before."""
        found, cuts = list[tuple[str, float]](), [at for at, who in self.deaths if who == "connection"]
        for at, who in self.deaths:
            named = next((t - at for t, line in self.said if t >= at and names(line, who)), math.inf)
            if who in OUTSIDE or any(cut <= at < cut + CUT_SECONDS for cut in cuts):
                continue
            if named < math.inf or self.seconds - at > NAMING_SECONDS:
                found.append((who, named))
        return found

    def wrong(self) -> list[str]:
        """What a run that died of nothing must not do."""
        found = [*self.broken]
        if self.ended != "finished":
            found.append(self.ended)
        if (silence := self.silence()) > SILENCE_SECONDS:
            found.append(f"{silence:.0f} s without a line")
        return found + [f"no line names {who}" for who, seconds in self.naming() if seconds == math.inf]

    def silence(self) -> float:
        """The longest time after the first death without a step and without a line that names who died."""
        if not self.deaths:
            return 0.0
        marks = [t for t, line in self.said if any(names(line, who) for _, who in self.deaths)] + self.progress
        first, end = min(at for at, _ in self.deaths), self.seconds
        times = [first, *sorted(t for t in marks if first <= t <= end), end]
        return max(later - earlier for earlier, later in pairwise(times))


def names(line: str, victim: str) -> bool:
    """Whether a line says something about a victim."""
    return re.search(NAMED.get(victim, victim), line) is not None


def pairs_of(first: str) -> list[Pair]:
    """Every pair with this one first, at every moment with every delay; two at the same time have no order."""
    later = VICTIMS[VICTIMS.index(first) :]
    return [
        Pair(first, second, moment, delay)
        for second in VICTIMS
        for moment in MOMENTS
        for delay in DELAYS
        if delay or second in later
    ]
