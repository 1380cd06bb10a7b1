"""Predicts the seconds of a step, waiting times and staleness by an analytic model of how groups flow from the engines
to the trainer. A step in this file is an optimizer step; its seconds are the time until the next one.

    admission (lookahead, slots) -> trajectories share the engines -> environment -> complete -> trainer -> new version

The slowest of three limits determines the seconds of a step: the slots, the trainer, or admission. Admission lets the
groups of a mini-batch begin once the engines serve the version of `lookahead` + 1 steps before. So if admission is the
limit, `lookahead` + 1 mini-batches have been admitted when one is leased. The leased mini-batch is complete, so the
groups of `lookahead` mini-batches may still be open:

    sum over k = 1, 2, ... of  P(a group takes longer than k steps - training - sync)  =  lookahead

With lookahead 0 a step waits for the longest group of its mini-batch. The fewer requests run, the faster an
engine iterates, and the number of running requests follows from the seconds of a step (Little's law). `tests/sim`
runs the buffer's own code for admission; this model takes milliseconds for a configuration, so that many splits of the
GPUs can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from service.types import Float64s

QUANTILES = 1024
"""Number of group lengths that represent the distribution of the lengths."""
LONGEST = 0.56
"""The mean length of the longest of B groups is about the quantile 1 - 0.56 / B of the lengths (Gumbel)."""
SHARPNESS = 17.0
"""Exponent of `either_longer`. If generation and training need the same time, the time for which they wait for each
other, because both vary at random, costs 1 - 2 ** (-1 / 17), or 4 %, of their speed. The figure is from a
simulation with a lookahead of 4 and lengths of moderate tails."""
BACKLOG = 40.0
"""Exponent that sets how sharply the queue of complete groups grows when the trainer becomes the slower side; fitted to
simulations."""
ADMISSION = 1.01
"""Admission is the limit if an optimizer step takes more than this many times the seconds that slots and trainer
need."""
FULL = 0.99
"""Slots are the limit if they need at least this fraction of the seconds of an optimizer step."""
PHASES, HALVINGS, ROUNDS = 16, 40, 100
"""Number of moments of an optimizer step at which the open groups are counted; maximum rounds of the search for the
seconds of an optimizer step, and of the search for the seconds of an engine's iteration."""


@dataclass(frozen=True)
class Flow:
    """Results of the analytic model: means over the optimizer steps of a run."""

    step_seconds: float
    trainer_waits: float
    """Fraction of the time for which the trainer waits."""
    generators_wait: float
    """Fraction of the time for which a slot has no group, averaged over the slots."""
    engines_idle: float
    """Fraction of the time for which an engine has no group, averaged over the engines, as
    `async/generator_wait_fraction` counts it."""
    staleness: float
    """Mean number of versions between the middle of a group's generation and its training."""
    running: float
    """Mean number of requests in an engine, including requests that wait for room in the KV cache."""


def either_longer(one: float, other: float) -> float:
    """Seconds of an optimizer step for which generation and training, at the same time, need `one` and `other` seconds:
    the longer of the two, plus up to about 4 % if the two are similar, because random delays of one side hold up the
    other side."""
    longer, shorter = max(one, other), min(one, other)
    return longer * float((1 + (shorter / longer) ** SHARPNESS) ** (1 / SHARPNESS)) if longer else 0.0


def seconds_of_means(generation: float, training: float, arrival: float, lookahead: float, concurrency: float) -> float:
    """Seconds of an optimizer step if only means are known, not the distribution of the lengths of trajectories.

    `generation`, `training`: mean seconds that each of the two needs for a mini-batch.

    The result is the larger of two times. The first is `either_longer` of generation and training. The second follows
    from admission: the group that takes a group's place is admitted `lookahead` + 1 optimizer steps later. In this time
    the first group is generated while up to `concurrency` mini-batches are generated, is trained, and the new weights
    reach the engines, which takes `arrival` seconds.

    >>> seconds_of_means(3.0, 1.0, 0.0, lookahead=0, concurrency=1)
    4.0
    """
    ahead, beside = lookahead + 1, either_longer(generation, training)
    return max(beside, (min(concurrency, ahead) * generation + training + arrival) / ahead)


def mean_before_cut(mean: float, sigma: float, most: float) -> float:
    """The mean of lognormal lengths whose mean is `mean` after those above `most` are cut to `most`.

    >>> mean_before_cut(100.0, 0.0, 200.0), round(mean_before_cut(100.0, 1.0, 200.0))
    (100.0, 146)
    """
    if not sigma or mean >= most:
        return mean * math.exp(sigma**2 / 2 + 4 * sigma)  # then all quantiles are cut
    normal, low, high = NormalDist(), 0.0, math.log(most / mean) + sigma**2 / 2 + 40 * sigma
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        room = (math.log(most / mean) - middle) / sigma
        cut = mean * math.exp(middle) * normal.cdf(room - sigma / 2) + most * (1 - normal.cdf(room + sigma / 2))
        low, high = (middle, high) if cut < mean else (low, middle)
    return mean * math.exp(high)


@dataclass(frozen=True)
class Setting:
    """The analytic model: its inputs (amounts and rates) and its equations. Axis `Q`: the `QUANTILES` (1024) group
    lengths that represent the distribution of lengths; all are equally frequent."""

    mini_batch_size: int
    samples: int
    """Number of trajectories of a group."""
    lookahead: int
    slots: int
    """Number of groups that all engines together generate at once."""
    engines: int
    iteration: Callable[[float], float]
    """Seconds of an iteration of an engine, by the number of requests that run in it."""
    tokens: float
    """Mean number of sampled tokens of a trajectory, before longer ones are cut to `most_tokens`."""
    sigma: float
    most_tokens: float
    environment_seconds: float
    """Seconds that a whole trajectory spends in its environment."""
    train_seconds: float
    after_seconds: float = 0.0
    """Seconds from the commit of an optimizer step until the trainer asks for the next mini-batch."""
    sync_seconds: float = 0.0
    """Seconds from the commit of an optimizer step until the engines serve the new weights."""

    @cached_property
    def _longest_Q(self) -> Float64s:
        """[Q] number of tokens of the longest trajectory of each group."""
        return self._lengths(self.samples)

    @cached_property
    def _group_tokens(self) -> float:
        """Mean number of sampled tokens of a group."""
        return self.samples * float(self._lengths(1).mean())

    @property
    def _late(self) -> float:
        """Seconds from a lease until the engines serve the weights that the mini-batch's optimizer step produces."""
        return self.train_seconds + self.sync_seconds

    def _lengths(self, samples: int) -> Float64s:
        """Quantiles of the tokens of the longest of `samples` trajectories."""
        tail_Q = ((np.arange(QUANTILES) + 0.5) / QUANTILES) ** (1 / samples)
        normal_Q = np.array([NormalDist().inv_cdf(float(tail)) for tail in tail_Q])
        lengths_Q = self.tokens * np.exp(self.sigma * normal_Q - self.sigma**2 / 2)
        return np.minimum(lengths_Q, self.most_tokens)

    def _at(self, step: float) -> tuple[Float64s, float]:
        """[Q] seconds of groups, and the number of requests in an engine with work, if an optimizer step takes `step`
        seconds."""
        running, most = 0.0, self.slots * self.samples / self.engines
        longest = int(QUANTILES * (1 - LONGEST / self.mini_batch_size))
        for _ in range(ROUNDS):
            iteration, before = self.iteration(running), running
            seconds_Q = self._longest_Q * iteration + self.environment_seconds
            generating = min(step, seconds_Q[longest] + self._queue(seconds_Q))
            generated = self.mini_batch_size * self._group_tokens * iteration / generating
            running = min(most, generated / self.engines)
            if running - before <= 1e-4 * running:
                break
        return seconds_Q, running * generating / step

    def _queue(self, seconds_Q: Float64s) -> float:
        """Seconds for which the last group of a mini-batch waits for a slot."""
        return max(0.0, self.mini_batch_size / self.slots - 1) * float(seconds_Q.mean())

    def _full(self) -> tuple[Float64s, float]:
        """[Q] seconds of groups, and the number of requests in an engine, if all slots are always busy: requests also
        wait for room in the KV cache."""
        running = 0.0
        for _ in range(ROUNDS):
            iteration, before = self.iteration(running), running
            seconds_Q = self._longest_Q * iteration + self.environment_seconds
            running = self.slots * self._group_tokens * iteration / float(seconds_Q.mean()) / self.engines
            if running - before <= 1e-4 * running:
                break
        return seconds_Q, running

    def _longer(self, seconds_Q: Float64s, seconds: Float64s) -> Float64s:
        """Fraction of the groups that take longer than each of these seconds."""
        return 1 - np.searchsorted(seconds_Q, seconds, side="right") / QUANTILES

    def _admitted(self, floor: float) -> float:
        """Seconds of an optimizer step if admission is the limit, but at least `floor`."""
        lookahead = self.lookahead

        def is_too_short(step: float) -> bool:
            seconds_Q, _ = self._at(step)
            queue = self._queue(seconds_Q) if lookahead == 0 else 0.0
            begun = np.linspace(0.0, queue, 8)
            cycles = np.arange(1, 2 + lookahead + int((seconds_Q[-1] + queue + self._late) / step))
            longer = self._longer(seconds_Q, cycles[:, None] * step - self._late - begun)
            return float(longer.mean(1).sum()) > lookahead + LONGEST / self.mini_batch_size

        low, high = floor, floor
        while is_too_short(high):
            low, high = high, 2 * high + self._late
        for _ in range(HALVINGS if high > floor else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if is_too_short(middle) else (low, middle)
        return high

    def _staleness(self, step: float, full: float, busy: float, seconds_Q: Float64s) -> float:
        """Mean over groups of the versions from the middle of their generation to their lease."""
        lookahead, middle_Q = self.lookahead, np.ceil((seconds_Q / 2 + self.sync_seconds) / step)
        if not lookahead:
            return 0.0
        if step > ADMISSION * either_longer(full, busy):  # groups begin together and are leased when complete
            return float(np.maximum(0.0, np.ceil((seconds_Q + self._late) / step) - middle_Q).mean())
        # otherwise groups wait for a slot or for the trainer: then each is trained at the last moment
        at_last = float(np.maximum(0.0, lookahead + 1 - middle_Q).mean())
        at_once = min(float(lookahead), (float(seconds_Q.mean()) / 2 + self.train_seconds) / step)
        share = 1 / (1 + min(full / busy, 1e3) ** BACKLOG) if busy else 0.0  # the power of a larger base would overflow
        return share * at_last + (1 - share) * at_once

    def _open(self, step: float, full: float, seconds_Q: Float64s) -> Float64s:
        """[P] number of open groups at several moments between two optimizer steps, counted from when the engines serve
        new weights."""
        batch = self.mini_batch_size
        if full >= FULL * step:  # groups begin one by one
            return np.array([batch * float(seconds_Q.mean()) / step])
        begun = np.linspace(0.0, self._queue(seconds_Q), 8)
        phases, cycles = (
            np.arange(PHASES) / PHASES * step,
            np.arange(1 + int((seconds_Q[-1] + begun[-1]) / step)) * step,
        )
        age = phases[:, None, None] + cycles[:, None] - begun
        open_P: Float64s = np.where(age >= 0, self._longer(seconds_Q, age), 0.0).mean(2).sum(1)
        return batch * open_P

    def flow(self) -> Flow:
        """Solve the equations; the results are means of the steady state, after the start of the run."""
        full_Q, running = self._full()
        full, busy = self.mini_batch_size * float(full_Q.mean()) / self.slots, self.train_seconds + self.after_seconds
        step = self._admitted(either_longer(full, busy))
        seconds_Q, running = (full_Q, running) if full >= FULL * step else self._at(step)
        open_P = self._open(step, full, seconds_Q)
        return Flow(
            step_seconds=step,
            trainer_waits=max(0.0, 1 - busy / step),
            generators_wait=max(0.0, 1 - float(open_P.mean()) / self.slots),
            engines_idle=float(np.maximum(0.0, 1 - open_P / self.engines).mean()),
            staleness=self._staleness(step, full, busy, seconds_Q),
            running=running,
        )
