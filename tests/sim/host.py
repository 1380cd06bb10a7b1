"""The buffer's process, which may die at any time, and the network over which other processes ask it."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from service.handoff.buffer import Buffer
from service.handoff.buffer_settings import SYNC_SECONDS
from service.handoff.claims import WaitingClaims
from service.handoff.journal.journal import Journal
from service.handoff.verbs import Claim, ClaimAnswer, Wait
from service.types import PolicyVersion
from tests.sim.disk import MemoryDisk
from tests.sim.faults import Faults, Network
from tests.sim.loop import Process, Resume, VirtualClock
from tests.sim.scenario import Scenario, SimulationSettings
from tests.sim.scorers import Scorers
from tests.sim.witness import Witness

FOLDER = Path("journal")
PROMPT_UIDS = [f"prompt-{row}" for row in range(1000)]
TICK_SECONDS = 0.5
RETRY_SECONDS = 8.0
"""A client sends a request again when no answer came for this time."""
POLL_SECONDS = 5.0
"""Seconds for which the host may keep a claim or a lease waiting before it answers with a Wait."""


class Poll(NamedTuple):
    """A request whose answer was a Wait; the buffer is asked again until `deadline`."""

    deadline: float
    request: Callable[[Buffer], Any]
    reply: Resume


class Host(Process):
    """The simulated process of the buffer: passes each request to a real `Buffer`, and sends the answer only after the
    journal is synced. After a death it comes back with what its disk kept."""

    def __init__(
        self,
        settings: SimulationSettings,
        scenario: Scenario,
        faults: Faults,
        network: Network,
        rngs: tuple[np.random.Generator, np.random.Generator],
        segment_bytes: int,
    ) -> None:
        """`rngs`: of the deaths and of the scorers."""
        super().__init__(network.loop)
        self.settings, self.faults, self.network = settings, faults, network
        self.witness = Witness(settings)
        self.disk = MemoryDisk()
        self.buffer: Buffer
        self.journal: Journal
        self.clock: VirtualClock
        self.scorers: Scorers
        self.alive = False
        self.on_death: Callable[[], None] = lambda: None
        self.doom: tuple[str, int] | None = None
        """The seam at which to die, `before_sync` or `after_sync`, and how many passes of it to survive first."""
        self.answers = self.bad_answers = 0
        """Of all scorers so far."""
        self._scenario, self._rngs = scenario, rngs
        self._segment_bytes = segment_bytes
        self._unsynced: list[tuple[int, Resume, Any]] = []
        self._polls: list[Poll] = []
        self.claims = WaitingClaims(lambda claim, most: self.buffer.claim_several(claim, most))
        self._updated: dict[str, PolicyVersion] = {}
        """New versions of engines, by generator, since the waiting claims were last tried."""
        self._sync_is_due = False
        self._look_is_due = False

    def start(self) -> None:
        """Start a process with the files that the disk holds; its monotonic clock starts at a random time."""
        self.alive = True
        self.clock = VirtualClock(self.loop, float(self._rngs[0].uniform(0, 1e6)))
        self.journal = Journal(FOLDER, self.clock, self.disk, self._segment_bytes)
        self.buffer = Buffer(self.settings.buffer, PROMPT_UIDS, self.journal, self.clock)
        self.journal.sync()
        self.scorers = Scorers(self, self._scenario.scorer_seconds, self._rngs[1])
        self.run(self._tick())
        self.witness.look(self.buffer)
        self.witness.scored(self.buffer)

    def die(self) -> None:
        """End as by kill -9 and loss of power: unsynced bytes are lost and no more answers are sent."""
        super().die()
        self.alive = False
        self.scorers.end()
        self._unsynced, self._polls, self._sync_is_due = [], [], False
        self.claims.take()
        self.disk.lose_power(self._rngs[0])
        self.on_death()

    def passes(self, seam: str) -> bool:
        """Whether the process survives the point `seam`; counts down to the death there."""
        if seam == "after_sync" and self.journal.synced == self.journal.position:
            self.witness.scored(self.buffer)
        if self.alive and self.doom is not None and self.doom[0] == seam:
            self.doom = (seam, self.doom[1] - 1) if self.doom[1] > 0 else None
            if self.doom is None:
                self.die()
        return self.alive

    def ask(self, request: Callable[[Buffer], Any], reply: Resume, patience: float = 0.0) -> None:
        """Answer a request to the buffer. While the buffer returns a Wait (a reason to wait), the request is repeated,
        for up to `patience` seconds; then the answer is the Wait."""
        if not self.alive:
            return
        answer = request(self.buffer)
        if patience and isinstance(answer, Wait):
            self._polls.append(Poll(self.loop.now + patience, request, reply))
        else:
            self._answer(answer, reply)

    def claim(self, claim: Claim, reply: Resume) -> None:
        """Answer a claim as soon as there is a group for it; after `POLL_SECONDS` without a group, the answer is a
        Wait, which has the reason to wait."""
        if self.alive:
            self.claims.answer(claim, 1, self.loop.now + POLL_SECONDS, partial(self._answer_claim, reply))

    def _answer_claim(self, reply: Resume, answer: ClaimAnswer) -> None:
        self._answer(answer[0] if isinstance(answer, list) else answer, reply)

    def serves(self, generator: str, version: PolicyVersion) -> None:
        """Try the waiting claims of a generator again soon, because its engine now serves the newer weights of
        `version`."""
        self._updated[generator] = version
        self.look_soon()

    def settled(self, resume: Resume) -> None:
        """Call `resume` once all events of the journal until now are on the disk."""
        self._answer(None, resume)

    def look_soon(self) -> None:
        """Check the waiting requests again soon, because something outside the buffer changed."""
        if not self._look_is_due:
            self._look_is_due = True
            self.loop.after(0.0, self._look_again)

    def _answer(self, answer: Any, reply: Resume) -> None:
        if not self.passes("before_sync"):
            return
        self._unsynced.append((self.journal.position, reply, answer))
        self._sync_in(SYNC_SECONDS)

    def _sync_in(self, seconds: float) -> None:
        if not self._sync_is_due:
            self._sync_is_due = True
            self.run(self._sync(seconds))

    async def _sync(self, seconds: float) -> None:
        """Group commit: sync, send the answers that the sync covers, then check the waiting requests again."""
        await asyncio.sleep(seconds)
        self._sync_is_due = False
        synced = self.journal.sync()
        if not self.passes("after_sync"):
            return
        leaving = [(reply, answer) for position, reply, answer in self._unsynced if position <= synced]
        self._unsynced = [entry for entry in self._unsynced if entry[0] > synced]
        for reply, answer in leaving:
            reply(answer)
        self._look_again()
        if self._unsynced:
            self._sync_in(TICK_SECONDS)

    def _look_again(self) -> None:
        """Answer the waiting requests that have an answer now or whose deadline has passed."""
        self._look_is_due = False
        if not self.alive:
            return
        if self.buffer.ledger.scoring:
            self.scorers.look()
        self._serve_claims()
        polls, self._polls = self._polls, []
        for poll in polls:
            answer = poll.request(self.buffer)
            if self.loop.now < poll.deadline and isinstance(answer, Wait):
                self._polls.append(poll)
                continue
            self._answer(answer, poll.reply)
            if not self.alive:
                return

    def _serve_claims(self) -> None:
        updated, self._updated = self._updated, {}
        for waiting in self.claims.take() if updated else ():
            claim = waiting.claim._replace(serving=updated.get(waiting.claim.generator, waiting.claim.serving))
            if self.alive:
                self.claims.answer(claim, waiting.most, waiting.deadline, waiting.reply)
        self.claims.look()
        self.claims.expire(self.loop.now)

    async def _tick(self) -> None:
        while True:
            self.buffer.tick()
            self._look_again()
            await asyncio.sleep(TICK_SECONDS)


class Client(Process):
    """A process that sends requests to the buffer's host."""

    def __init__(self, host: Host, scenario: Scenario, rng: np.random.Generator) -> None:
        super().__init__(host.loop)
        self._host, self._scenario, self._rng = host, scenario, rng

    async def ask(self, request: Callable[[Buffer], Any], patience: float = 0.0) -> Any:
        """Send a request to the buffer; returns the answer. `patience`: as in `Host.ask`."""
        return await self.call(lambda reply: self._host.ask(request, reply, patience))

    async def call(self, request: Callable[[Resume], None]) -> Any:
        """Call `request`, which gets a function that takes the host's answer, again and again until its answer comes;
        returns the answer."""
        answered, network = self.loop.create_future(), self._host.network

        def receive(answer: Any) -> None:
            if not answered.done():
                answered.set_result(answer)

        while not answered.done():
            network.send(lambda: request(lambda answer: network.send(lambda: receive(answer))))
            await asyncio.wait([answered], timeout=RETRY_SECONDS if network.delay else None)
        return answered.result()
