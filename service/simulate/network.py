"""Messages between simulated processes: delayed, lost, doubled, overtaken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.simulate.loop import Loop


@dataclass(slots=True)
class Network:
    """How messages travel; a delay is drawn for each, so they overtake one another."""

    loop: Loop
    rng: np.random.Generator
    delay: float = 0.0
    """Mean seconds of one way; 0: messages arrive at once, in order."""
    lost: float = 0.0
    """Fraction of messages that never arrive."""
    doubled: float = 0.0
    """Fraction of messages that arrive twice."""

    def send(self, deliver: Callable[[], None]) -> None:
        """Deliver a message some time, or twice, or never."""
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


class Call:
    """A request that is repeated until its answer comes or its caller gives up."""

    def __init__(self, network: Network, request: Callable[[Callable[[Any], None]], None], patience: float) -> None:
        self._network = network
        self._request = request
        self._patience = patience
        self._done = False

    def start(self, on_answer: Callable[[Any], None], still_wanted: Callable[[], bool]) -> None:
        """Send the request; `on_answer` runs once, while the caller still wants it."""

        def receive(answer: Any) -> None:
            if not self._done and still_wanted():
                self._done = True
                on_answer(answer)

        def send() -> None:
            if self._done or not still_wanted():
                return
            self._network.send(lambda: self._request(lambda answer: self._network.send(lambda: receive(answer))))
            if self._network.delay:
                self._network.loop.after(self._patience, send)

        send()
