"""A simulated generator: claims groups, plays their trajectories in virtual time, sends the steps. It may leave, fall
silent, fail or lose responses."""

import asyncio
from typing import Any

import numpy as np
import xxhash

from service.columns import token_bytes
from service.handoff.steps.values import Role, StopReason, packed_roles
from service.handoff.steps.wire import encode
from service.handoff.verbs import Assignment, Claim, WaitReason
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
from tests.sim.loop import Resume
from tests.sim.scenario import Scenario

TOKEN_IDS = 1 << 16


class Generator(Client):
    """One generator actor with its engine; plays `slots` groups at once."""

    def __init__(self, name: str, host: Host, scenario: Scenario, rng: np.random.Generator) -> None:
        super().__init__(host, scenario, rng)
        self.name = name
        self.slots = scenario.slots(host.settings)
        self._max_tokens = scenario.longest(host.settings)
        """Maximum sampled tokens of one trajectory."""
        self._incarnation = 0
        self._sequence = self._request_id = 0
        self._outbox = StepColumns()
        self._unsent: list[tuple[TrajectoryId, int]] = []
        """(trajectory, step index) of the steps in the outbox."""
        self._leaves = False
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

    def update(self, version: PolicyVersion) -> PolicyVersion:
        """Load newer weights while requests run; returns the version of the tokens that are sampled from now on."""
        if version > self.serving:
            self._served_from.append(self.loop.now)
            self._served.append(version)
            self._host.serves(self.name, version)
        return self.serving

    def leave(self) -> None:
        """Claim and play no more, and send the steps that are finished."""
        self.die()
        self._leaves = True
        self.run(self._leave(), self.die)

    async def _leave(self) -> None:
        incarnation = self._incarnation
        if self._unsent:
            await self._send()
        await self.ask(lambda buffer: buffer.leave(self.name, incarnation, "leaves"))

    async def _join(self) -> None:
        self._incarnation = await self.ask(lambda buffer: buffer.join("generator", self.name))
        self._sequence = 0
        self._outbox, self._unsent = StepColumns(), []
        for _ in range(self.slots):
            self.run(self._slot())

    async def _slot(self) -> None:
        """Claim and play one group after the other."""
        while True:
            self._request_id += 1
            answer = await self._claim(self._request_id)
            if isinstance(answer, Assignment):
                lengths = self._lengths(len(answer.samples)).tolist()
                played = zip(answer.trajectories(), lengths, strict=True)
                await asyncio.gather(*(self._trajectory(of, answer.prompt_uid, length) for (of, _), length in played))
            elif isinstance(answer, Refusal):
                self._refused(answer)
                return
            elif answer.reason is WaitReason.DRAINED:
                return

    async def _claim(self, request_id: int) -> Any:
        def deliver(reply: Resume) -> None:
            self._host.claim(Claim(self.name, self._incarnation, self.serving, request_id), reply)

        return await self.call(deliver)

    def _lengths(self, count: int) -> Int64s:
        return np.minimum(self._scenario.lengths(self._rng, count), self._max_tokens)

    async def _trajectory(self, of: TrajectoryId, uid: str, left: int) -> None:
        """Play a trajectory of `left` tokens, spread evenly over its turns. Each step extends the whole step before it
        by one observation token."""
        scenario, faults = self._scenario, self._host.faults
        length, digest, roles = 0, xxhash.xxh3_64(), [Role.MAIN] * scenario.turns
        for turn in range(scenario.turns):
            count = max(left // (scenario.turns - turn), 1)
            left -= count
            began = self.loop.now
            if self.loop.now < faults.until and self._happens(faults.silent):
                await asyncio.sleep(faults.until)
                return
            await asyncio.sleep(count * scenario.token_seconds)
            reward = float(self._rng.random() < scenario.success)
            roles[turn] = Role.UNDELIVERED if self._happens(faults.undelivered) else Role.MAIN
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
                reason = StopReason.ENVIRONMENT_ERROR if self._happens(faults.failing) else StopReason.STOP
                self._outbox.end(TrajectoryEnd(of, uid, scenario.turns, str(reason), reward, packed_roles(roles)))
            self._unsent.append((of, turn))
            if len(self._unsent) == 1:
                self.run(self._send())

    def _happens(self, fraction: float) -> bool:
        return fraction > 0 and bool(self._rng.random() < fraction)

    def _versions(self, began: float, count: int) -> Int64s:
        """The version that was served when each token was sampled."""
        at_T = began + (np.arange(count) + 0.5) * self._scenario.token_seconds
        place_T = np.searchsorted(self._served_from, at_T, side="right") - 1
        return np.array([version.pack() for version in self._served])[place_T]

    async def _send(self) -> None:
        """Send all steps that finish within the linger time in one message."""
        await asyncio.sleep(self._scenario.linger_seconds)
        steps, self._unsent = self._unsent, []
        outbox, self._outbox = self._outbox, StepColumns()
        data = encode(outbox.step_group(Sender(self.name, self._incarnation, self._sequence)))
        self._sequence += 1
        answer = await self.ask(lambda buffer: buffer.submit(data))
        if isinstance(answer, Refusal):
            self._refused(answer)
            return
        for of, step in steps:
            if of not in answer.late:
                self._host.witness.acknowledged(of, step)

    def _refused(self, refusal: Refusal) -> None:
        """Handle a refusal: a fenced generator joins again; after other refusals the buffer starts another attempt."""
        if refusal.reason is not RefusalReason.FENCED:
            self._host.witness.refused(refusal)
        elif not self._leaves:
            self.start()
