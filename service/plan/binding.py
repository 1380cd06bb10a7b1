"""Finds the bottleneck of a run from the seconds that each part takes per optimizer step, and the speedup if there
were more of the bottleneck, such as one more engine. A step in this file is an optimizer step.

    generation: ENGINES, ENVIRONMENT, JOURNAL, WEIGHTS (engines pause)    seconds in which the slots generate as many
                                                                          groups as a mini-batch has
    training:   TRAINER, WEIGHTS (sent), EVALUATION, CHECKPOINT, JOURNAL  seconds from the lease of a mini-batch until
                                                                          the trainer asks for the next one

The two sides run at the same time, and within a side the parts follow one another. The side that needs less time waits
for the other side; the largest part of the other side binds (is the bottleneck). If both sides wait, there are three
cases. An engine or rank that is far slower than the others binds. Otherwise the new weights bind, if they take longer
to arrive than any part takes. Otherwise the sides wait for each other, and the lookahead binds. The seconds are
predicted by `baton plan`, or measured in a run; measured seconds of a side exclude the time for which the side waited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from service.plan.step_seconds import seconds_of_means


class Part(StrEnum):
    """A part of a run that can be the bottleneck (can bind)."""

    ENGINES = "engines"
    TRAINER = "trainer"
    ENVIRONMENT = "environment"
    WEIGHTS = "weights"
    JOURNAL = "journal"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    LOOKAHEAD = "lookahead"


class Side(StrEnum):
    """A side of a run: generation or training. The two sides run concurrently."""

    GENERATION = "generation"
    TRAINING = "training"

    @property
    def other(self) -> Side:
        """Training for generation, and generation for training."""
        return Side.TRAINING if self is Side.GENERATION else Side.GENERATION


BOTH_WAIT = 0.15
"""Both sides count as waiting if each waits for more than this fraction of the time."""

BALANCED = 0.1
"""The sides are in balance if one side needs at most this fraction less time than the other side."""


@dataclass(frozen=True)
class Demand:
    """The seconds per optimizer step that each part of a run needs, without waiting; and the settings on which the
    waiting depends."""

    generation: Mapping[Part, float]
    training: Mapping[Part, float]
    engines: int = 1
    ranks: int = 1
    lookahead: float = 2.0
    """Number of mini-batches that may be generated ahead; 0: generation and training alternate."""
    concurrency: float = 1.0
    """Number of groups that are generated at once if the buffer admits them, divided by the groups of a mini-batch."""
    shares_cores: bool = False
    """Whether engines and ranks share CPU cores, so that more engines slow the ranks down and vice versa."""
    arrival: float = 0.0
    """Seconds from a commit until the engines serve the new weights and the groups that wait for these weights are
    admitted."""
    seconds_of_step: float | None = None
    """Measured or simulated seconds of an optimizer step; None: `arithmetic_seconds` is used instead."""

    def of(self, side: Side) -> Mapping[Part, float]:
        """The seconds per optimizer step that each part of a side needs."""
        return self.generation if side is Side.GENERATION else self.training

    def seconds(self, side: Side) -> float:
        """Seconds per optimizer step that a side needs: the sum over its parts."""
        return sum(self.of(side).values())

    @property
    def longer(self) -> Side:
        """The side that needs more time per optimizer step."""
        return max(Side, key=self.seconds)

    @property
    def arithmetic_seconds(self) -> float:
        """Seconds from one optimizer step to the next, as `seconds_of_means` computes them from the seconds that each
        side needs."""
        generation, training = (self.seconds(side) for side in Side)
        return seconds_of_means(generation, training, self.arrival, self.lookahead, self.concurrency)

    @property
    def step_seconds(self) -> float:
        """Seconds from one optimizer step to the next, including the time for which the sides wait."""
        return self.arithmetic_seconds if self.seconds_of_step is None else self.seconds_of_step

    def waits(self, side: Side) -> float:
        """Fraction of the time for which `side` waits for the other side."""
        return max(0.0, 1 - self.seconds(side) / self.step_seconds) if self.step_seconds else 0.0

    def gain(self, part: Part, side: Side) -> float:
        """Speedup of the run with one more engine (if `part` is ENGINES), one more rank (TRAINER) or one more
        mini-batch of lookahead (LOOKAHEAD). For any other part: the speedup if the part took no time on `side`."""
        if part is Part.LOOKAHEAD:
            return self.speed_of(replace(self, lookahead=self.lookahead + 1))
        remaining = {Part.ENGINES: self.engines / (self.engines + 1), Part.TRAINER: self.ranks / (self.ranks + 1)}
        parts = self.of(side)
        parts = {**parts, part: parts.get(part, 0.0) * remaining.get(part, 0.0)}
        is_generation = side is Side.GENERATION
        return self.speed_of(replace(self, generation=parts) if is_generation else replace(self, training=parts))

    def speed_of(self, other: Demand) -> float:
        """How many times faster a run with the demand `other` is than one with this demand, by `arithmetic_seconds`."""
        seconds = other.arithmetic_seconds
        return self.arithmetic_seconds / seconds if seconds else 1.0


@dataclass(frozen=True)
class Binding:
    """The bottleneck of a run."""

    side: Side
    """The side for which the other side waits."""
    part: Part
    share: float
    """Fraction of the side's time that the part takes; if both sides wait, the fraction of time for which this side
    waits."""
    waits: float
    """Fraction of the time for which the other side waits."""
    balanced: bool
    """Whether both sides wait at most a short time for each other."""
    gain: float
    """Speedup of the run from one more engine, rank or mini-batch of lookahead, whichever binds. If another part binds:
    the speedup if the part took no time."""
    shares_cores: bool
    """Whether engines and ranks share CPU cores; see `Demand`."""
    both_wait: bool = False
    """Whether both sides wait, for each other or for new weights to arrive."""

    @property
    def is_bottleneck(self) -> bool:
        """Whether the sides are out of balance, and `gain`, rounded to two digits, is above 1."""
        return not self.balanced and round(self.gain, 2) > 1

    @property
    def is_usual(self) -> bool:
        """Whether the bottleneck is the engines or the trainer, or there is none; then the run spends its time on
        useful work."""
        return not self.is_bottleneck or self.part in (Part.ENGINES, Part.TRAINER)

    def sentence(self) -> str:
        """A description of the bottleneck in one line."""
        begin = f"{self.side}: {self.side.other} waits {self.waits:.0%} of the time"
        if self.both_wait:
            what = "each other" if self.part is Part.LOOKAHEAD else "new weights to arrive"
            begin = f"{self.part}: {begin.partition(': ')[2]}, {self.side} {self.share:.0%}, both for {what}"
        else:
            begin += f"; {self.part} {'take' if self.part.endswith('s') else 'takes'} {self.share:.0%} of {self.side}"
        return f"{begin}; {self._outlook()}" + (" (in balance)" if self.balanced else "")

    def _outlook(self) -> str:
        """What would change with more of the part, in words."""
        change = {
            Part.ENGINES: "one more engine",
            Part.TRAINER: "one more rank",
            Part.LOOKAHEAD: "a buffer.lookahead of one more",
        }.get(self.part, "a run without that")
        if round(self.gain, 2) <= 1:
            return f"no bottleneck: {change} would be no faster"
        if self.shares_cores and self.part in (Part.ENGINES, Part.TRAINER, Part.LOOKAHEAD):
            return f"engines and ranks share CPU cores, so what {change} would give is not known"
        return f"{change} would give {self.gain:.2f}x"


def binding(demand: Demand, slow: Part | None = None) -> Binding:
    """Find the bottleneck of a run: the part for which one of the sides waits.

    `slow`: ENGINES if one engine is far slower than the other engines, TRAINER if one rank is far slower than the other
    ranks; if both sides wait, `slow` is the bottleneck.

    >>> found = binding(Demand({Part.ENGINES: 8.0, Part.ENVIRONMENT: 1.0}, {Part.TRAINER: 3.0}, engines=2))
    >>> print(found.sentence())
    generation: training waits 67% of the time; engines take 89% of generation; one more engine would give 1.42x
    """
    side, both_wait = demand.longer, demand.waits(demand.longer) > BOTH_WAIT
    if both_wait and slow is None:
        late = demand.arrival > max(max(demand.of(each).values()) for each in Side)
        part, share = Part.WEIGHTS if late else Part.LOOKAHEAD, demand.waits(side)
        gain = demand.speed_of(replace(demand, arrival=0.0)) if late else demand.gain(part, side)
    else:
        if both_wait:
            side = Side.GENERATION if slow is Part.ENGINES else Side.TRAINING
        parts, total = demand.of(side), demand.seconds(side)
        part = slow if both_wait and slow is not None else max(parts, key=lambda each: parts[each])
        share, gain = parts[part] / total if total else 0.0, demand.gain(part, side)
    return Binding(
        side=side,
        part=part,
        share=share,
        waits=demand.waits(side.other),
        balanced=not both_wait and demand.seconds(side.other) >= (1 - BALANCED) * demand.seconds(side),
        gain=gain,
        shares_cores=demand.shares_cores,
        both_wait=both_wait and slow is None,
    )
