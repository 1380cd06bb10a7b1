"""Trajectories that workers on other machines play: offered, claimed, and kept alive by heartbeats until they end.

    offered --POST /rl/claim--> claimed --calls, heartbeats--> finished        the end is journalled, then answered
                                   |--no heartbeat, deadline, abort--> lost    attempted again

A session outlives its generator's process: the restarted generator continues it (`Agents.restore`), and waits up to
`agents.heartbeat_deadline` for the worker.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from service.agents.session import Session
from service.config.rollout import AgentsConfig
from service.handoff.steps.stop_reason import StopReason
from service.rollout.environment import Task, TrajectoryFailed


class Offer(NamedTuple):
    """A trajectory that a worker may claim."""

    session: Session
    task: Task
    seed: int
    claimed: asyncio.Future[None]


class Offers:
    """The trajectories that wait for workers, and the trajectories that workers play at the moment."""

    def __init__(self, config: AgentsConfig) -> None:
        self.config = config
        self._waiting: dict[str, Offer] = {}
        """The waiting offers by the session's name, oldest first."""
        self._offered = asyncio.Semaphore(0)
        """Wakes one claim per offer; its count includes offers that nobody can claim any more."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def play(self, session: Session, task: Task, seed: int, is_claimed: bool) -> None:
        """Offer a session to workers, unless it `is_claimed` already; returns when the session has ended.

        Raises:
            TrajectoryFailed: the session's worker sent no heartbeat, or missed the deadline.
        """
        if not is_claimed:
            claimed = asyncio.get_running_loop().create_future()
            self.offer(Offer(session, task, seed, claimed))
            try:
                await asyncio.wait({claimed, session.ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._waiting.pop(session.name, None)
                session.is_offered = False
        session.hear()
        try:
            async with asyncio.timeout(self.config.deadline):
                while not session.ended.done() and (left := self.config.heartbeat_deadline - session.silence) > 0:
                    await asyncio.wait({session.ended}, timeout=left)
        except TimeoutError as error:
            late = f"its worker did not finish it within {self.config.deadline:g} s"
            raise TrajectoryFailed(StopReason.ENVIRONMENT_TIMEOUT, late) from error
        if not session.ended.done():
            silent = f"nothing was heard of its agent worker for {self.config.heartbeat_deadline:g} s"
            raise TrajectoryFailed(StopReason.ENVIRONMENT_TIMEOUT, silent)

    async def claim(self, seconds: float) -> Offer | None:
        """Take the oldest offer; None if there is none within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._offered.acquire()
                while not self._waiting:
                    await self._offered.acquire()
        except TimeoutError:
            return None
        return self._waiting.pop(next(iter(self._waiting)))

    def offer(self, offer: Offer) -> None:
        """Offer a trajectory to workers. A claimed trajectory is offered again if the answer to the worker's claim was
        lost."""
        self._waiting[offer.session.name] = offer
        offer.session.is_offered = True
        self._offered.release()
