"""Messages between simulated processes: delayed, lost, doubled, overtaken; and the requests made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.handoff.buffer import Buffer
from service.simulate.host import Host
from service.simulate.loop import Loop, Process, Resume, Waiting
from service.simulate.scenario import Scenario

POLL_SECONDS = 5.0
"""How long the host may keep a claim or a lease waiting before it answers with a Wait."""
RETRY_SECONDS = 8.0
"""A request without an answer is sent again after so long."""


@dataclass(slots=True)
class Network:
    """How messages travel. A delay is drawn for each message, so messages overtake one another."""

    loop: Loop
    rng: np.random.Generator
    delay: float = 0.0
    """Mean seconds of one way; 0: messages arrive at once, in order."""
    lost: float = 0.0
    """Fraction of messages that never arrive."""
    doubled: float = 0.0
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


class Client(Process):
    """A process that makes requests of the buffer's host over the network."""

    def __init__(self, host: Host, network: Network, scenario: Scenario, rng: np.random.Generator) -> None:
        super().__init__(host.loop)
        self._host = host
        self._witness = host.witness
        self._network = network
        self._scenario = scenario
        self._rng = rng

    def ask(self, request: Callable[[Buffer], Any], patience: float = 0.0) -> Waiting:
        """`answer = yield self.ask(...)`: the buffer's answer; see `Host.ask`."""
        return self.call(lambda reply: self._host.ask(request, reply, patience))

    def call(self, request: Callable[[Resume], None]) -> Waiting:
        """`answer = yield self.call(...)`: send a request, again and again until its answer comes.

        `request` runs where the message arrives, and gives the answer to the function that it receives.
        """
        life, answered = self.life, False

        def begin(resume: Resume) -> None:
            def receive(answer: Any) -> None:
                nonlocal answered
                if not answered and self.life == life:
                    answered = True
                    resume(answer)

            def send() -> None:
                if answered or self.life != life:
                    return
                self._network.send(lambda: request(lambda answer: self._network.send(lambda: receive(answer))))
                if self._network.delay:
                    self.loop.after(RETRY_SECONDS, send)

            send()

        return begin
