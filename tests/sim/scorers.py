"""Scorers in a simulation: the real `Asking` in simulated time, and workers that answer well or in some bad way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from service.handoff.scoring import Answer
from service.handoff.steps.wire import accepted_group
from service.scorers.asking import Asking
from service.scorers.reply import MAX_REPLY_BYTES, Failure, ScorerFailed, encode_answer
from service.types import StepGroup

if TYPE_CHECKING:
    from tests.sim.host import Host

LATE_SECONDS = 4.0
"""Mean seconds after which an answer comes a second time."""


class Scorers:
    """What one life of the buffer's process asks its scorers with."""

    def __init__(self, host: Host, mean_seconds: float, rng: np.random.Generator) -> None:
        self._host, self._mean_seconds, self._rng = host, mean_seconds, rng
        self._settings = host.settings.scorers
        workers = {name: [Worker(self, name) for _ in range(each.workers)] for name, each in self._settings.items()}
        self._asking = Asking(self._settings, host.buffer.scoring, workers, self._settled)
        self._asks: asyncio.Task[None] | None = None
        if self._settings:
            self._asks = host.loop.create_task(self._asking.run())
            self._asks.add_done_callback(lambda task: task.cancelled() or task.result())  # a bug ends the simulation

    def look(self) -> None:
        """Look for groups to score."""
        self._asking.look()

    def end(self) -> None:
        """Ask no more."""
        if self._asks is not None:
            self._asks.cancel()

    async def _settled(self) -> None:
        done = self._host.loop.create_future()
        self._host.settled(lambda _: None if done.done() else done.set_result(None))
        await done

    async def answer(self, name: str, data: bytes) -> bytes:
        """An answer that no other answer equals, or one that is wrong in some way."""
        await asyncio.sleep(float(self._rng.exponential(self._mean_seconds)))
        group, faults = accepted_group(data), self._host.faults
        if self._host.loop.now >= faults.until or self._rng.random() >= faults.bad_answers:
            return encode_answer(self._answer(name, group))
        self._host.bad_answers += 1
        match self._rng.integers(6):
            case 0:
                await self._host.loop.create_future()  # until the deadline
            case 1:
                raise ScorerFailed(Failure.DIED, "killed")
            case 2:
                answer = self._answer(name, group)
                rewards = [np.nan if self._rng.random() < 0.5 else reward for reward in answer.rewards or ()]
                return encode_answer(answer._replace(rewards=rewards or None))
            case 3:
                return bytes(MAX_REPLY_BYTES + len(data) + 1)
            case 4:
                return encode_answer(self._answer(name, group, too_few=1))
        self._later(name, group)
        return encode_answer(self._answer(name, group))

    def _later(self, name: str, group: StepGroup) -> None:
        """Give another answer later, to whichever buffer there is then."""
        host, [group_id, *_] = self._host, group.ends.group_id_E.tolist()

        def answer() -> None:
            if host.alive:
                host.buffer.scoring.accept(group_id, name, self._answer(name, group))
                host.settled(lambda _: None)

        host.loop.after(float(self._rng.exponential(LATE_SECONDS)), answer)

    def _answer(self, name: str, group: StepGroup, too_few: int = 0) -> Answer:
        """An answer like no other one, without the last numbers."""
        number = self._host.answers = self._host.answers + 1
        if self._settings[name].kind == "teacher":
            n_sampled = int(np.count_nonzero(group.steps.loss_mask_N))
            return Answer(logprobs=np.full(n_sampled - too_few, -number, np.float32))
        return Answer([number + sample / 8 for sample in range(len(group.ends) - too_few)])


class Worker:
    """A scorer's process; see `service.scorers.asking.Worker`."""

    def __init__(self, scorers: Scorers, name: str) -> None:
        self._scorers, self._name = scorers, name

    async def ready(self) -> None:
        """A simulated process is there at once."""

    async def ask(self, row: int, group: bytes) -> bytes:
        """The reply about a group."""
        return await self._scorers.answer(self._name, group)

    def renew(self) -> None:
        """Another process takes its place at once."""
