"""The buffer's process with its scorers, and the way in which other processes send requests to the buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from service.handoff.buffer import Buffer
from service.handoff.journal.journal import Journal
from service.handoff.scoring import Answer
from service.handoff.verbs import Claim, Wait
from service.handoff.waiting_claims import ClaimAnswer, WaitingClaims
from service.types import PolicyVersion
from tests.sim.disk import MemoryDisk
from tests.sim.loop import Activity, Loop, Process, Resume, VirtualClock, Waiting
from tests.sim.scenario import Scenario, SimulationSettings

FOLDER = Path("journal")
PROMPT_UIDS = [f"prompt-{row}" for row in range(1000)]
TICK_SECONDS = 0.5
POLL_SECONDS = 5.0
"""Seconds for which the host may keep a claim or a lease waiting before it answers with a Wait."""


class Poll(NamedTuple):
    """A request whose answer was a Wait; the buffer is asked again until `deadline`."""

    deadline: float
    request: Callable[[Buffer], Any]
    reply: Resume


class Host(Process):
    """The simulated process of the buffer: passes each request to a real `Buffer`, and sends the answer only after the
    journal is synced."""

    def __init__(
        self, settings: SimulationSettings, scenario: Scenario, loop: Loop, rng: np.random.Generator, segment_bytes: int
    ) -> None:
        """`rng`: source of the scorers' random numbers."""
        super().__init__(loop)
        self.settings = settings
        self.disk = MemoryDisk()
        self.buffer: Buffer
        self.journal: Journal
        self.clock: VirtualClock
        self.scorers: SimulatedScorers
        self.alive = True
        self._scenario, self._rng = scenario, rng
        self._segment_bytes = segment_bytes
        self._unsynced: list[tuple[int, Resume, Any]] = []
        self._polls: list[Poll] = []
        self.claims = WaitingClaims(lambda claim, most: self.buffer.claim_several(claim, most))
        self._updated: dict[str, PolicyVersion] = {}
        """New versions of engines, by generator, since the waiting claims were last tried."""
        self._sync_is_due = False
        self._look_is_due = False

    def start(self, now: float = 0.0) -> None:
        """Start the buffer's process with the files that the disk holds; `now`: the time on the clock of the new
        process."""
        self.clock = VirtualClock(self.loop, now)
        self.journal = Journal(FOLDER, self.clock, self.disk, self._segment_bytes)
        self.buffer = Buffer(self.settings.buffer, PROMPT_UIDS, self.journal, self.clock)
        self.journal.sync()
        self.scorers = self.new_scorers()
        self.run(self._tick())

    def new_scorers(self) -> SimulatedScorers:
        """Make the scorers of this process."""
        return SimulatedScorers(self, self._scenario.scorer_seconds, self._rng)

    def passes(self, seam: str) -> bool:
        """Whether the process survives the point `seam`, which is `before_sync` or `after_sync`; tests kill it
        there."""
        return self.alive

    def ask(self, request: Callable[[Buffer], Any], reply: Resume, patience: float = 0.0) -> None:
        """Answer a request to the buffer. While the buffer returns a Wait (a reason to wait), the request is repeated,
        for up to `patience` seconds; then the answer is the Wait."""
        answer = request(self.buffer)
        if patience and isinstance(answer, Wait):
            self._polls.append(Poll(self.loop.now + patience, request, reply))
        else:
            self._answer(answer, reply)

    def claim(self, claim: Claim, reply: Resume) -> None:
        """Answer a claim as soon as there is a group for it; after `POLL_SECONDS` without a group, the answer is a
        Wait, which has the reason to wait."""
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
        self._sync_in(self.settings.sync_interval)

    def _sync_in(self, seconds: float) -> None:
        if not self._sync_is_due:
            self._sync_is_due = True
            self.run(self._sync(seconds))

    def _sync(self, seconds: float) -> Activity:
        """Group commit: sync, send the answers that the sync covers, then check the waiting requests again."""
        yield self.wait(seconds)
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

    def _tick(self) -> Activity:
        while True:
            self.buffer.tick()
            self._look_again()
            yield self.wait(TICK_SECONDS)


class Client(Process):
    """A process that sends requests to the buffer's host."""

    def __init__(self, host: Host, scenario: Scenario, rng: np.random.Generator) -> None:
        super().__init__(host.loop)
        self._host = host
        self._scenario = scenario
        self._rng = rng

    def ask(self, request: Callable[[Buffer], Any], patience: float = 0.0) -> Waiting:
        """Send a request to the buffer: after `answer = yield self.ask(...)` the activity has the answer. `patience`:
        as in `Host.ask`."""
        return self.call(lambda reply: self._host.ask(request, reply, patience))

    def call(self, request: Callable[[Resume], None]) -> Waiting:
        """Call `request`, which gets a function that takes the host's answer: after `answer = yield self.call(...)` the
        activity has the answer."""
        return request


class SimulatedScorers(Process):
    """Simulates all scorers; each scores as many waiting groups at once as it has workers."""

    def __init__(self, host: Host, mean_seconds: float, rng: np.random.Generator) -> None:
        """`mean_seconds`: mean seconds that a scorer needs for a group."""
        super().__init__(host.loop)
        self._host, self._scorers, self._scoring = host, host.settings.scorers, host.buffer.scoring
        self._mean_seconds, self._rng = mean_seconds, rng
        self._asked: dict[str, set[int]] = {name: set() for name in self._scorers}

    def look(self) -> None:
        """Start to score waiting groups on free workers."""
        for name, asked in self._asked.items():
            waiting = [group_id for group_id in self._scoring.pending(name) if group_id not in asked]
            for group_id in waiting[: self._scorers[name].workers - len(asked)]:
                asked.add(group_id)
                self.run(self._ask(name, group_id))

    def _ask(self, name: str, group_id: int) -> Activity:
        scorer, answer = self._scorers[name], self._answer(name, group_id)
        for _ in range(scorer.attempts):
            seconds = float(self._rng.exponential(self._mean_seconds))
            yield self.wait(min(seconds, scorer.deadline))
            if seconds <= scorer.deadline:
                self._scoring.accept(group_id, name, answer)
                break
            self._scoring.failed(name, "deadline", "")
        else:
            self._scoring.give_up(group_id, name, "deadline")
        self._asked[name].discard(group_id)
        yield self._host.settled

    def _answer(self, name: str, group_id: int) -> Answer:
        _, group = self._scoring.group(group_id)
        if self._scorers[name].kind == "teacher":
            return Answer(logprobs=np.full(int(np.count_nonzero(group.steps.loss_mask_N)), -1.0, np.float32))
        return Answer([sample / 8 for sample in range(len(group.ends))])
