"""A simulated generator: claims groups, plays their trajectories in virtual time, sends the steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from service.columns import select, token_bytes
from service.handoff.steps.values import Role, StopReason, packed_roles
from service.handoff.steps.wire import accepted_group, encode
from service.handoff.verbs import Assignment, Claim, Receipt, WaitReason
from service.rollout.step_sinks import StepColumns
from service.types import (
    Extension,
    Int64s,
    PolicyVersion,
    Refusal,
    RefusalReason,
    Sender,
    Step,
    TrajectoryEnd,
    TrajectoryId,
)
from tests.sim.host import Client, Host
from tests.sim.loop import Activity, Resume, Waiting
from tests.sim.measurements import Measurements
from tests.sim.scenario import Scenario

TOKEN_IDS = 1 << 16


class SimulatedGenerator(Client):
    """One generator actor with its engine; plays `slots` groups at once."""

    def __init__(
        self, name: str, host: Host, scenario: Scenario, rng: np.random.Generator, measured: Measurements
    ) -> None:
        super().__init__(host, scenario, rng)
        self._measured = measured
        self.name = name
        self.slots = scenario.slots(host.settings)
        self.wait_seconds = 0.0
        """Seconds without a group, summed over the slots."""
        self._max_tokens = scenario.longest(host.settings)
        """Maximum sampled tokens of one trajectory."""
        self._incarnation = 0
        self._sequence = self._request_id = 0
        self._outbox = StepColumns()
        self._unsent: list[tuple[TrajectoryId, int]] = []
        """(trajectory, step index) of the steps in the outbox."""
        self._evaluated: Callable[[], None] | None = None
        """Called when this generator's evaluation ends; None if no evaluation runs."""
        self._newest = PolicyVersion(0, 0)
        """The newest weights that were sent."""
        self._slots_wait: list[Resume] = []
        """Slots that claim again when the evaluation has ended."""
        self._served_from: list[float] = [0.0]
        self._served = [PolicyVersion(0, 0)]

    @property
    def serving(self) -> PolicyVersion:
        """The policy version that the engine serves."""
        return self._served[-1]

    def start(self) -> None:
        """Join the run, then keep every slot busy with groups."""
        self.die()
        self.run(self._join())

    def die(self) -> None:
        """End every activity, including an evaluation."""
        super().die()
        self._slots_wait.clear()
        self._end_evaluation()

    def evaluate(self, count: int, ended: Callable[[], None]) -> None:
        """Play `count` trajectories of an evaluation. Until they end or `data.eval_deadline` has passed, load no new
        weights and claim no groups."""
        self._evaluated = ended
        lengths, at_once = self._lengths(count), self.slots * self._host.settings.buffer.limits.n_samples_per_prompt
        longest = max((int(lengths[place::at_once].sum()) for place in range(min(at_once, count))), default=0)

        def evaluation() -> Activity:
            yield self.wait(min(longest * self._scenario.token_seconds, self._host.settings.data.eval_deadline))

        self.run(evaluation(), self._end_evaluation)

    def _end_evaluation(self) -> None:
        ended, self._evaluated = self._evaluated, None
        if ended is not None:
            self.update(self._newest)
            waiting, self._slots_wait = self._slots_wait, []
            for resume in waiting:
                resume(None)
            ended()

    def update(self, version: PolicyVersion) -> PolicyVersion:
        """Load newer weights while requests run, unless an evaluation runs; returns the version of the tokens that are
        sampled from now on."""
        self._newest = max(self._newest, version)
        if version > self.serving and self._evaluated is None:
            self._served_from.append(self.loop.now)
            self._served.append(version)
            self._host.serves(self.name, version)
        return self.serving

    def _join(self) -> Activity:
        self._incarnation = yield self.ask(lambda buffer: buffer.join("generator", self.name))
        self._sequence = 0
        self._outbox, self._unsent = StepColumns(), []
        for _ in range(self.slots):
            self.run(self._slot())

    def _slot(self) -> Activity:
        """Claim and play one group after the other."""
        since = self.loop.now
        while True:
            if self._evaluated is not None:
                yield self._slots_wait.append
            self._request_id += 1
            answer = yield self._claim(self._request_id)
            if isinstance(answer, Assignment):
                self.wait_seconds += self.loop.now - since
                played = zip(answer.trajectories(), self._lengths(len(answer.samples)).tolist(), strict=True)
                yield self.all_of(
                    [self._trajectory(of, answer.prompt_uid, length, taken) for (of, taken), length in played]
                )
                since = self.loop.now
            elif isinstance(answer, Refusal):
                self._refused(answer)
                return
            elif answer.reason is WaitReason.DRAINED:
                return

    def _claim(self, request_id: int) -> Waiting:
        def deliver(reply: Resume) -> None:
            self._host.claim(Claim(self.name, self._incarnation, self.serving, request_id), reply)

        return self.call(deliver)

    def _lengths(self, count: int) -> Int64s:
        return np.minimum(self._scenario.lengths(self._rng, count), self._max_tokens)

    def _trajectory(self, of: TrajectoryId, uid: str, left: int, taken: bytes) -> Activity:
        """Play a trajectory of `left` tokens, spread evenly over its turns; `taken`: encoded steps that another
        generator played.

        Each step extends the whole step before it by one observation token.
        """
        scenario = self._scenario
        self._measured.generated[of] = left
        length, digest, roles, first = 0, xxhash.xxh3_64(), [Role.MAIN] * scenario.turns, 0
        if taken:
            steps = accepted_group(taken).steps
            steps = select(steps, np.argsort(steps.index_K))
            first, length = len(steps), len(steps.token_ids_N)
            digest.update(token_bytes(steps.token_ids_N))
        for turn in range(first, scenario.turns):
            count = max(left // (scenario.turns - turn), 1)
            left -= count
            began = self.loop.now
            if silence := self.silence():
                yield self.wait(silence)
                return
            yield self.wait(count * scenario.token_seconds)
            reward = float(self._rng.random() < scenario.success)
            roles[turn] = self.role_of_turn()
            ids = (np.arange(count + 1, dtype=np.int32) + 31 * of.group_id + 7 * of.sample) % TOKEN_IDS
            step = Step(
                of,
                uid,
                turn,
                ids[:1],
                ids[1:],
                logprobs=np.full(count, -0.5, np.float32),
                loss_mask=np.ones(count, np.bool_),
                versions=self._versions(began, count),
                reward=reward,
                extends=Extension(turn - 1, length, digest.intdigest()) if turn else None,
            )
            self._outbox.append(step)
            length += count + 1
            digest.update(token_bytes(ids))
            if turn == scenario.turns - 1:
                end = TrajectoryEnd(of, uid, scenario.turns, str(self.stop_reason()), reward, packed_roles(roles))
                self._outbox.end(end)
            self._unsent.append((of, turn))
            if len(self._unsent) == 1:
                self.run(self._send())

    def _versions(self, began: float, count: int) -> Int64s:
        """The version that was served when each token was sampled."""
        at_T = began + (np.arange(count) + 0.5) * self._scenario.token_seconds
        place_T = np.searchsorted(self._served_from, at_T, side="right") - 1
        return np.array([version.pack() for version in self._served])[place_T]

    def _send(self) -> Activity:
        """Send all steps that finish within the linger time in one message."""
        yield self.wait(self._scenario.linger_seconds)
        steps, self._unsent = self._unsent, []
        outbox, self._outbox = self._outbox, StepColumns()
        data = encode(outbox.step_group(Sender(self.name, self._incarnation, self._sequence)))
        self._sequence += 1
        answer = yield self.ask(lambda buffer: buffer.submit(data))
        if isinstance(answer, Refusal):
            self._refused(answer)
            return
        self.acknowledged(steps, answer)

    def acknowledged(self, steps: list[tuple[TrajectoryId, int]], receipt: Receipt) -> None:
        """Called with the buffer's receipt of a message, and with (trajectory, step index) of each step in it; tests
        override it."""

    def silence(self) -> float:
        """Seconds for which a trajectory hangs before it is dropped without an end; 0, unless a test overrides this."""
        return 0.0

    def role_of_turn(self) -> Role:
        """The role of the next turn: `main`, unless a test overrides this."""
        return Role.MAIN

    def stop_reason(self) -> StopReason:
        """The stop reason of a trajectory that has played its last turn: `STOP`, unless a test overrides this."""
        return StopReason.STOP

    def _refused(self, refusal: Refusal) -> None:
        """Handle a refusal: a fenced generator joins again; after other refusals the buffer starts another attempt."""
        if refusal.reason is RefusalReason.FENCED:
            self.start()
