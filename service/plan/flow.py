"""Groups between engines and trainer, event by event: seconds of a step, waiting and staleness.

    admission (lookahead, slots) -> trajectories share the engines -> environment -> complete -> trainer -> new version

A trajectory takes as many iterations of its engine as it has tokens, and an iteration takes the longer the more run. So
the tail of a mini-batch runs in a nearly empty engine, and on-policy training waits for it. `baton simulate` plays the
same rule with the buffer's own code; this needs milliseconds for a configuration, so that splits can be compared.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

STEPS, WARM_UP = 36, 12
"""Optimizer steps that are played, and those of them before anything is measured."""
MAX_TRAJECTORIES = 512
"""Trajectories of a mini-batch that are played; of larger ones a part, with as much less of everything."""


@dataclass(frozen=True)
class Setting:
    """What flows how fast."""

    mini_batch_size: int
    samples: int
    """Trajectories of a group."""
    lookahead: int
    slots: int
    """Groups that all engines generate at once."""
    engines: int
    iteration: Callable[[float], float]
    """Seconds of an iteration of an engine in which so many requests run."""
    tokens: float
    """Mean of the sampled tokens of a trajectory."""
    sigma: float
    most_tokens: float
    environment_seconds: float
    """Of a whole trajectory."""
    train_seconds: float
    after_seconds: float = 0.0
    """Of the trainer after the commit of a step, before it asks for the next mini-batch."""
    sync_seconds: float = 0.0
    """From the commit of a step until the engines serve its weights."""


@dataclass(frozen=True)
class Flow:
    """What came of it."""

    step_seconds: float
    trainer_waits: float
    """Fraction of the time."""
    generators_wait: float
    """Fraction of the slots' time."""
    engines_idle: float
    """Fraction of the engines' time in which they have no group, as `async/generator_wait_fraction` counts it."""
    staleness: float
    """Versions between the middle of a group's generation and its training, mean."""
    running: float
    """Requests that run in an engine, mean."""


def played(setting: Setting, seed: int = 0) -> Flow:
    """Play the setting until its steps are done."""
    scale = min(1.0, MAX_TRAJECTORIES / (setting.mini_batch_size * setting.samples))
    world = _World(setting, max(1, round(setting.mini_batch_size * scale)), scale, np.random.default_rng(seed))
    while len(world.trained_at) < STEPS:
        world.advance()
    return world.flow()


class _World:
    """The state at one moment; `now` in seconds, `ticks` in iterations of the engines."""

    def __init__(self, setting: Setting, batch: int, scale: float, rng: np.random.Generator) -> None:
        self._setting, self._batch, self._rng = setting, batch, rng
        self._engines = setting.engines * scale
        self._slots = max(1, round(setting.slots * batch / setting.mini_batch_size))
        self.now = self._ticks = 0.0
        self.trained_at: list[float] = []
        self._admitted = self._open = self._running = 0
        self._version = self._served = 0
        self._generating: list[tuple[float, int]] = []
        """(tick of the last token, group)"""
        self._timed: list[tuple[float, int]] = []
        """(time, group of a trajectory whose environment answers; -1: a commit, -2: weights have arrived, -3: the
        trainer is free)"""
        self._left: dict[int, int] = {}
        self._begun: dict[int, tuple[float, float]] = {}
        self._complete: list[int] = []
        self._idle_since: float | None = 0.0
        self._waited = self._slot_seconds = self._running_seconds = self._empty_seconds = self._stale = 0.0
        self._measured_from = 0.0
        self._admit()

    def advance(self) -> None:
        """Go to the next event."""
        pace = self._setting.iteration(self._running / self._engines) if self._running else math.inf
        tick = self._generating[0][0] if self._generating else math.inf
        token_at = self.now + (tick - self._ticks) * pace if self._generating else math.inf
        timed_at = self._timed[0][0] if self._timed else math.inf
        then = min(token_at, timed_at)
        if self._running:
            self._ticks += (then - self.now) / pace
        self._slot_seconds += self._open * (then - self.now)
        self._running_seconds += self._running * (then - self.now)
        self._empty_seconds += max(0.0, 1 - self._open / self._engines) * (then - self.now)
        self.now = then
        if timed_at < token_at:
            self._timed_event(heapq.heappop(self._timed)[1])
        else:
            self._ticks, group = heapq.heappop(self._generating)
            self._running -= 1
            if self._setting.environment_seconds:
                heapq.heappush(self._timed, (self.now + self._setting.environment_seconds, group))
            else:
                self._ended(group)

    def _timed_event(self, what: int) -> None:
        if what >= 0:
            self._ended(what)
        elif what == -1:
            self._trained()
        elif what == -2:
            self._served += 1
            self._admit()
        else:
            self._idle_since = self.now
            self._lease()

    def _ended(self, group: int) -> None:
        """A trajectory has ended."""
        self._left[group] -= 1
        if not self._left[group]:
            self._open -= 1
            self._complete.append(group)
            self._begun[group] = (self._begun[group][0], self.now)
            self._lease()
            self._admit()

    def _admit(self) -> None:
        setting = self._setting
        while self._open < self._slots and self._admitted // self._batch <= self._served + setting.lookahead:
            group, self._admitted, self._open = self._admitted, self._admitted + 1, self._open + 1
            self._left[group], self._begun[group] = setting.samples, (self.now, self.now)
            normal_G = self._rng.normal(-(setting.sigma**2) / 2, setting.sigma, setting.samples)
            for tokens in np.minimum(setting.tokens * np.exp(normal_G), setting.most_tokens):
                heapq.heappush(self._generating, (self._ticks + max(1.0, float(tokens)), group))
            self._running += setting.samples

    def _lease(self) -> None:
        if self._idle_since is None or len(self._complete) < self._batch:
            return
        self._waited += self.now - self._idle_since
        self._idle_since = None
        taken, self._complete = self._complete[: self._batch], self._complete[self._batch :]
        for group in taken:
            begun, ended = self._begun.pop(group)
            self._stale += self._version - bisect.bisect(self.trained_at, (begun + ended) / 2)
        heapq.heappush(self._timed, (self.now + self._setting.train_seconds, -1))

    def _trained(self) -> None:
        self.trained_at.append(self.now)
        self._version += 1
        heapq.heappush(self._timed, (self.now + self._setting.sync_seconds, -2))
        heapq.heappush(self._timed, (self.now + self._setting.after_seconds, -3))
        if self._version == WARM_UP:
            self._measured_from = self.now
            self._waited = self._slot_seconds = self._running_seconds = self._empty_seconds = self._stale = 0.0

    def flow(self) -> Flow:
        """The means since the warm-up."""
        seconds, steps = self.now - self._measured_from, STEPS - WARM_UP
        return Flow(
            step_seconds=float(seconds / steps),
            trainer_waits=float(self._waited / seconds),
            generators_wait=float(1 - self._slot_seconds / (self._slots * seconds)),
            engines_idle=float(self._empty_seconds / seconds),
            staleness=self._stale / (steps * self._batch),
            running=float(self._running_seconds / seconds / self._engines),
        )
