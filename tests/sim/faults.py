"""What goes wrong in a world: how often, and a network to which it happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from tests.sim.loop import Loop


def _fault(*drawn: float) -> Any:
    """A frequency of faults: 0 unless it is given, or one of these where `Faults.drawn` chooses."""
    return field(default=0.0, metadata={"drawn": drawn})


@dataclass(frozen=True, slots=True)
class Faults:
    """How much goes wrong, until `until`; rates are events per simulated second."""

    until: float = 0.0
    buffer_deaths: float = _fault(0.0, 0.05, 0.3)
    generator_deaths: float = _fault(0.0, 0.1)
    generator_freezes: float = _fault(0.0, 0.1)
    generator_leaves: float = _fault(0.0, 0.2)
    """Generators that leave in order; another one joins in place of each."""
    trainer_deaths: float = _fault(0.0, 0.1)
    disk_full: float = _fault(0.0, 0.05)
    clock_jumps: float = _fault(0.05)
    silent: float = _fault(0.0, 0.03)
    """Fraction of turns that never end."""
    bad_steps: float = _fault(0.0, 0.1)
    """Fraction of optimizer steps that are not applied."""
    delay: float = _fault(0.01, 0.2)
    """Mean seconds that a message travels; 0: messages arrive at once, and none is lost."""
    lost: float = _fault(0.0, 0.1)
    doubled: float = _fault(0.0, 0.1)
    failing: float = _fault(0.0, 0.1)
    """Fraction of trajectories whose environment fails in the last turn."""
    undelivered: float = _fault(0.0, 0.1)
    """Fraction of turns whose response nobody receives, so that it is not trained."""
    bad_answers: float = _fault(0.0, 0.6)
    """Fraction of a scorer's answers that are late, lost, wrong or twofold."""

    @classmethod
    def drawn(cls, rng: np.random.Generator, until: float) -> Faults:
        """Each kind of fault is absent, or as frequent as it can be while the world still makes progress."""
        choices = {kind.name: kind.metadata["drawn"] for kind in fields(cls) if kind.metadata}
        return cls(until, **{name: float(rng.choice(rates)) for name, rates in choices.items()})


@dataclass(slots=True)
class Network:
    """How messages travel. A delay is drawn for each message, so messages overtake one another."""

    loop: Loop
    rng: np.random.Generator
    delay: float
    """Mean seconds of one way; 0: messages arrive at once, in order."""
    lost: float
    """Fraction of messages that never arrive."""
    doubled: float
    """Fraction of messages that arrive twice."""

    def send(self, deliver: Callable[[], None]) -> None:
        """Deliver a message after a delay, or twice, or never."""
        if not self.delay:
            deliver()
            return
        if self.rng.random() < self.lost:
            return
        for _ in range(1 + (self.rng.random() < self.doubled)):
            self.loop.after(float(self.rng.exponential(self.delay)), deliver)

    def heal(self) -> None:
        """Lose and double nothing from now on."""
        self.lost = self.doubled = 0.0
