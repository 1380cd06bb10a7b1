"""A simulated generator: claims groups, plays their trajectories in virtual time, sends the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from service.handoff.steps.builder import StepColumns
from service.handoff.steps.stop_reason import StopReason
from service.handoff.steps.wire import encode
from service.handoff.verbs import Assignment, Claim, Receipt, Wait, WaitReason
from service.simulate.host import Host
from service.simulate.loop import Loop
from service.simulate.messages import SimulatedTrajectory
from service.simulate.network import Call, Network
from service.simulate.scenario import Scenario
from service.simulate.witness import Witness
from service.types import Int64s, PolicyVersion, Refusal, RefusalReason, Sender, TrajectoryEnd, TrajectoryId

POLL_SECONDS = 5.0
PATIENCE_SECONDS = 8.0


class SimulatedGenerator:
    """One generator actor with its engine; `slots` groups at once."""

    def __init__(
        self,
        name: str,
        slots: int,
        longest_turn: int,
        scenario: Scenario,
        host: Host,
        network: Network,
        witness: Witness,
        rng: np.random.Generator,
    ) -> None:
        self.name = name
        self.wait_seconds = 0.0
        """Slot-seconds without work."""
        self.slots = slots
        self._longest_turn = longest_turn
        self._scenario = scenario
        self._host = host
        self._loop: Loop = host.loop
        self._network = network
        self._witness = witness
        self._rng = rng
        self._life = 0
        """Counts deaths and rejoins; callbacks of an earlier life are ignored."""
        self._frozen_until = 0.0
        self._incarnation = 0
        self._sequence = self._request_id = 0
        self._outbox = StepColumns()
        self._unsent: list[tuple[TrajectoryId, int]] = []
        """(trajectory, step index) of the steps in the outbox."""
        self._served_from: list[float] = [0.0]
        self._served: list[int] = [PolicyVersion(0, 0).pack()]

    @property
    def serving(self) -> PolicyVersion:
        """The version that the engine serves."""
        return PolicyVersion.unpack(self._served[-1])

    def start(self) -> None:
        """Join, then keep every slot busy."""
        self._life += 1
        self._call(lambda reply: self._host.ask(lambda b: b.join("generator", self.name), reply), self._joined)

    def die(self) -> None:
        """End as by kill -9; `start` begins the next life."""
        self._life += 1

    def freeze(self, seconds: float) -> None:
        """Stand still, as by SIGSTOP, and go on afterwards."""
        self._frozen_until = max(self._frozen_until, self._loop.now + seconds)

    def update(self, version: PolicyVersion) -> None:
        """New weights, in flight: tokens from now on are of this version."""
        if version.pack() > self._served[-1]:
            self._served_from.append(self._loop.now)
            self._served.append(version.pack())
            self._host.look_soon()

    def _joined(self, incarnation: int) -> None:
        self._incarnation, self._sequence = incarnation, 0
        self._outbox, self._unsent = StepColumns(), []
        for _ in range(self.slots):
            self._claim(self._loop.now)

    def _claim(self, since: float) -> None:
        def answered(answer: Assignment | Wait | Refusal) -> None:
            if isinstance(answer, Assignment):
                self.wait_seconds += self._loop.now - since
                self._play_group(answer)
            elif isinstance(answer, Refusal):
                self._refused(answer)
            elif answer.reason is not WaitReason.DRAINED:
                self._claim(since)

        self._request_id += 1
        request_id = self._request_id

        def request(reply: Callable[[Any], None]) -> None:
            incarnation = self._incarnation
            self._host.poll(
                lambda buffer: buffer.claim(Claim(self.name, incarnation, self.serving, request_id)),
                POLL_SECONDS,
                reply,
                lambda: self.serving,
            )

        self._call(request, answered)

    def _play_group(self, work: Assignment) -> None:
        left = len(work.samples)

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._claim(self._loop.now)

        lengths = np.minimum(self._scenario.lengths(self._rng, left), self._scenario.turns * self._longest_turn)
        for sample, attempt, length in zip(work.samples, work.attempts, lengths.tolist(), strict=True):
            trajectory = SimulatedTrajectory(TrajectoryId(work.group_id, sample, attempt), work.prompt_uid)
            self._witness.began(trajectory.of, length)
            self._play(trajectory, length, ended)

    def _play(self, trajectory: SimulatedTrajectory, left: int, ended: Callable[[], None]) -> None:
        """One turn; the trajectory's tokens spread evenly over its turns."""
        turns_left = self._scenario.turns - trajectory.n_steps
        count = max(left // turns_left, 1)
        began = self._loop.now
        if self._rng.random() < self._scenario.faults.silent and self._loop.now < self._scenario.faults.until:
            self._later(self._scenario.faults.until, ended)
            return

        def finished() -> None:
            reward = float(self._rng.random() < self._scenario.success)
            trajectory.append_step(self._outbox, self._versions(began, count), reward)
            if turns_left > 1:
                self._put(trajectory.of, trajectory.n_steps - 1)
                self._play(trajectory, left - count, ended)
            else:
                failing = self._scenario.faults.failing
                failed = failing > 0 and self._rng.random() < failing
                reason = StopReason.ENVIRONMENT_ERROR if failed else StopReason.STOP
                self._outbox.end(TrajectoryEnd(trajectory.of, trajectory.uid, trajectory.n_steps, str(reason), reward))
                self._put(trajectory.of, trajectory.n_steps - 1)
                ended()

        self._later(count * self._scenario.token_seconds, finished)

    def _versions(self, began: float, count: int) -> Int64s:
        """The version that was served when each token was sampled."""
        at_T = began + (np.arange(count) + 0.5) * self._scenario.token_seconds
        place_T = np.searchsorted(self._served_from, at_T, side="right") - 1
        return np.array(self._served, np.int64)[place_T]

    def _put(self, of: TrajectoryId, step: int) -> None:
        """Send a step that is in the outbox, together with the steps that finish soon."""
        self._unsent.append((of, step))
        if len(self._unsent) == 1:
            self._later(self._scenario.linger_seconds, self._send)

    def _send(self) -> None:
        steps, self._unsent = self._unsent, []
        outbox, self._outbox = self._outbox, StepColumns()
        sender = Sender(self.name, self._incarnation, self._sequence)
        self._sequence += 1
        data = encode(outbox.step_group(sender))

        def answered(answer: Receipt | Refusal) -> None:
            if isinstance(answer, Refusal):
                self._refused(answer)
                return
            for of, step in steps:
                if of.group_id not in answer.superseded:
                    self._witness.acknowledged(of, step)

        self._call(lambda reply: self._host.ask(lambda buffer: buffer.submit(data), reply), answered)

    def _refused(self, refusal: Refusal) -> None:
        """A fenced generator joins anew; for any other refusal the buffer begins another attempt."""
        if refusal.reason is RefusalReason.FENCED:
            self.start()
        else:
            self._witness.refused(refusal)

    def _call(self, request: Callable[[Callable[[Any], None]], None], answered: Callable[[Any], None]) -> None:
        life = self._life
        Call(self._network, request, PATIENCE_SECONDS).start(
            lambda answer: self._when_awake(lambda: answered(answer), life), lambda: self._life == life
        )

    def _later(self, seconds: float, callback: Callable[[], None]) -> None:
        life = self._life
        self._loop.after(seconds, lambda: self._when_awake(callback, life))

    def _when_awake(self, callback: Callable[[], None], life: int) -> None:
        """Run a callback of this life, after the freeze that there may be."""
        if self._life != life:
            return
        if self._loop.now < self._frozen_until:
            self._loop.after(self._frozen_until - self._loop.now, lambda: self._when_awake(callback, life))
        else:
            callback()
