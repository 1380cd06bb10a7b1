"""Trajectories that are played by workers on other machines: offered, claimed, heard of until they end.

    offered --POST /rl/claim--> claimed --calls, heartbeats--> finished        the end is journalled, then answered
                                   |--no heartbeat, deadline, abort--> lost    attempted again

A session outlives its generator's process: the next one goes on with it (`Agents.restore`), and waits as long for the
worker as between two heartbeats.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, NamedTuple

from aiohttp import web

from service.agents.dialects.chat import CHAT
from service.agents.dialects.dialect import Refused
from service.agents.requests import Requests, is_connected
from service.agents.session import Session
from service.config.rollout import AgentsConfig
from service.handoff.steps.stop_reason import StopReason
from service.rollout.environment import Task, TrajectoryFailed

CLAIM_SECONDS = 20.0
"""Seconds for which a claim waits for a trajectory; then it gets status 204."""
MAX_CLAIM_BYTES = 1 << 10
"""Bytes of the body of a claim, heartbeat or abort; nothing in it is read."""


class Offer(NamedTuple):
    """A trajectory that a worker may claim."""

    session: Session
    task: Task
    seed: int
    claimed: asyncio.Future[None]


class Offers:
    """The trajectories that wait for workers, and those that workers play."""

    def __init__(self, config: AgentsConfig) -> None:
        self.config = config
        self._waiting: dict[str, Offer] = {}
        """By the session's name, oldest first."""
        self._claims: dict[asyncio.Future[None], None] = {}
        """Claims that wait for an offer, oldest first; each offer wakes one of them."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def play(self, session: Session, task: Task, seed: int, is_claimed: bool) -> None:
        """Return when the session has ended, which a worker plays; one that `is_claimed` is offered to no other.

        Raises:
            TrajectoryFailed: its worker was silent or late.
        """
        if not is_claimed:
            claimed = asyncio.get_running_loop().create_future()
            self._offer(Offer(session, task, seed, claimed))
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
            silent = f"nothing was heard of its worker for {self.config.heartbeat_deadline:g} s"
            raise TrajectoryFailed(StopReason.ENVIRONMENT_TIMEOUT, silent)

    async def claim(self, seconds: float) -> Offer | None:
        """The oldest offer; None where there is none for so long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not self._waiting and (left := until - loop.time()) > 0:
            self._claims[woken := loop.create_future()] = None
            try:
                await asyncio.wait({woken}, timeout=left)
            finally:
                self._claims.pop(woken, None)
        return self._waiting.pop(next(iter(self._waiting))) if self._waiting else None

    def give_back(self, offer: Offer) -> None:
        """Nobody got the offer that was claimed."""
        if offer.session.state == "open":
            self._offer(offer)

    def _offer(self, offer: Offer) -> None:
        self._waiting[offer.session.name] = offer
        offer.session.is_offered = True
        if self._claims:
            woken = next(iter(self._claims))
            del self._claims[woken]
            woken.set_result(None)


class ClaimRoutes:
    """What workers ask for, with the worker key; about a session also its own key counts."""

    def __init__(self, requests: Requests, offers: Offers) -> None:
        self._requests = requests
        self._offers = offers

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """The routes of claims, heartbeats, aborts and states."""
        router.add_post("/rl/claim", self._requests.guarded(CHAT, self._claim))
        router.add_get("/rl/sessions/{session}", self._requests.guarded(CHAT, self._show))
        for verb, answer in (("heartbeat", self._heartbeat), ("abort", self._abort)):
            router.add_post(f"/rl/sessions/{{session}}/{verb}", self._requests.guarded(CHAT, answer))

    async def _claim(self, request: web.Request) -> web.StreamResponse:
        """The oldest trajectory that waits; 204 after `CLAIM_SECONDS` without one."""
        self._requests.check_worker(request)
        async with self._requests.body(request, MAX_CLAIM_BYTES):
            pass
        offer = await self._offers.claim(CLAIM_SECONDS)
        if offer is None:
            return web.Response(status=204)
        if not is_connected(request):
            self._offers.give_back(offer)
            return web.Response()  # nobody reads it
        offer.session.hear()
        offer.claimed.set_result(None)
        return web.json_response(
            {
                **_shown(offer.session, request),
                "api_key": offer.session.key,
                "task": asdict(offer.task),
                "seed": offer.seed,
                "deadline": self._offers.config.deadline,
                "heartbeat_deadline": self._offers.config.heartbeat_deadline,
                "sampling": offer.session.sampling,
            }
        )

    async def _show(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(_shown(self._requests.managed(request), request))

    async def _heartbeat(self, request: web.Request) -> web.StreamResponse:
        session = self._requests.managed(request)
        async with self._requests.body(request, MAX_CLAIM_BYTES):
            session.check_open()
        return web.json_response({})

    async def _abort(self, request: web.Request) -> web.StreamResponse:
        """The worker plays it no more: it is attempted again. A repetition changes nothing."""
        session = self._requests.managed(request)
        async with self._requests.body(request, MAX_CLAIM_BYTES):
            pass
        if session.state == "finished":
            raise Refused(409, None, "the session is finished")
        session.close(TrajectoryFailed(StopReason.ENVIRONMENT_ERROR, "its worker gave it up"))
        return web.json_response({})


def _shown(session: Session, request: web.Request) -> dict[str, Any]:
    """A session as whoever runs its agent sees it; the address is the one that the request came to."""
    address = f"{request.scheme}://{request.host}/s/{session.name}/v1"
    return {"session": session.name, "state": session.state, "base_url": address, "calls": session.n_steps}
