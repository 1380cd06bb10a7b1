"""A small world around a buffer: a clock to turn, a generator's hand, and trajectories to send."""

import errno
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.columns import digest
from service.config import Config
from service.config.core_settings import batch_settings, buffer_settings, message_limits, worst_bytes
from service.handoff.buffer import Buffer
from service.handoff.journal.disk import Buffer as Bytes
from service.handoff.journal.disk import File
from service.handoff.journal.journal import Journal
from service.handoff.leases import BatchJob
from service.handoff.steps import wire
from service.handoff.steps.tables import step_group
from service.handoff.verbs import Assignment, Claim, Receipt, Wait
from service.types import (
    Extension,
    MiniBatch,
    PolicyVersion,
    Refusal,
    Sender,
    Step,
    TrajectoryEnd,
    TrajectoryId,
)
from tests.recorded import KeepingDisk, replayed

START = PolicyVersion(1, 0)


def journal_bytes(settings: Config) -> int:
    """Bytes of the smallest journal that never fills up for good."""
    steps = max(settings.trainer.checkpoint_every * settings.trainer.keep_checkpoints, 1)
    return worst_bytes(settings).journal(steps * settings.trainer.mini_batch_size)


def no_room_for_new_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the disk takes more bytes only in files that have some."""

    def write_behind(self: File, offset: int, buffers: Sequence[Bytes]) -> int:
        if not offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, offset, buffers)

    write = File.write
    monkeypatch.setattr(File, "write", write_behind)


class TurnedClock:
    """A clock that stands still until it is turned."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def config(**sections: dict[str, Any]) -> Config:
    """Two groups of two samples a mini-batch, unless said otherwise."""
    values: dict[str, dict[str, Any]] = {
        "data": {"shuffle": False},
        "env": {"max_turns": 4},
        "generator": {"max_input_length": 64, "max_generate_length": 16},
        "buffer": {"lookahead": 1, "max_attempts": 3, "step_deadline": 10.0, "lease_deadline": 100.0},
        "algorithm": {"n_samples_per_prompt": 2},
        "trainer": {"mini_batch_size": 2, "ranks": 1, "max_tokens_per_micro_batch": 256},
    }
    for section, settings in sections.items():
        values.setdefault(section, {}).update(settings)
    return Config.model_validate(values)


def step(trajectory: TrajectoryId, uid: str, index: int, version: PolicyVersion = START, first: int = 10) -> Step:
    """A step of 3 prompt tokens and 2 sampled ones that continues the steps before it."""
    tokens = np.arange(first, first + 5 * index + 5, dtype=np.int32)
    before, prompt, response = np.split(tokens, [5 * index, 5 * index + 3])
    return Step(
        trajectory=trajectory,
        prompt_uid=uid,
        index=index,
        prompt_ids=prompt,
        response_ids=response,
        logprobs=np.full(2, -0.5, np.float32),
        loss_mask=np.ones(2, np.bool_),
        versions=np.full(2, version.pack(), np.int64),
        extends=Extension(index - 1, len(before), digest(before)) if index else None,
    )


class Generator:
    """Claims and sends for one generator name."""

    def __init__(self, buffer: Buffer, name: str = "g1", resumes: bool = False) -> None:
        self.buffer, self.name = buffer, name
        self.incarnation = buffer.join("generator", name, resumes=resumes)
        self.sequence = 0

    def claim(self, serving: PolicyVersion = START, only_moved: bool = False) -> Assignment | Wait | Refusal:
        return self.buffer.claim(Claim(self.name, self.incarnation, serving, only_moved=only_moved))

    def claimed(self, serving: PolicyVersion = START) -> Assignment:
        answer = self.claim(serving)
        assert isinstance(answer, Assignment), answer
        return answer

    def message(self, steps: Sequence[Step], ends: Sequence[TrajectoryEnd] = ()) -> bytes:
        self.sequence += 1
        return wire.encode(step_group(Sender(self.name, self.incarnation, self.sequence), steps, ends))

    def send(self, steps: Sequence[Step], ends: Sequence[TrajectoryEnd] = ()) -> Receipt | Refusal:
        return self.buffer.submit(self.message(steps, ends))

    def finish(
        self, work: Assignment, version: PolicyVersion = START, rewards: Sequence[float] = (1.0, 0.0), turns: int = 2
    ) -> None:
        """Send all steps and the end of every sample of an assignment."""
        for place, sample in enumerate(work.samples):
            receipt = self.play(work, sample, turns, rewards[place % len(rewards)], version=version)
            assert isinstance(receipt, Receipt), receipt

    def play(
        self,
        work: Assignment,
        sample: int,
        turns: int = 1,
        reward: float = 1.0,
        reason: str = "stop",
        version: PolicyVersion = START,
        **end: Any,
    ) -> Receipt | Refusal:
        """Send all steps and the end of one sample of an assignment; `end`: further fields of the end."""
        of = TrajectoryId(work.group_id, sample, work.attempts[work.samples.index(sample)])
        steps = [step(of, work.prompt_uid, index, version) for index in range(turns)]
        return self.send(steps, [TrajectoryEnd(of, work.prompt_uid, turns, reason, reward, **end)])


class World:
    """A buffer with its journal, a trainer and one generator."""

    def __init__(
        self, folder: Path, settings: Config | None = None, n_prompts: int = 100, segment_bytes: int = 1 << 20
    ) -> None:
        self.folder, self.settings, self.n_prompts = folder, settings or config(), n_prompts
        self.segment_bytes, self.rows_digest = segment_bytes, ""
        self.clock = TurnedClock()
        self.buffer = self.opened()
        self.trainer_incarnation = self.buffer.join("trainer", "trainer")
        self.generator = Generator(self.buffer)

    def opened(self) -> Buffer:
        """The buffer of a new process on the same folder."""
        self.journal = Journal(self.folder, self.clock, KeepingDisk(), self.segment_bytes)
        uids = [f"p{row}" for row in range(self.n_prompts)]
        settings = replace(buffer_settings(self.settings, 500), seed=3)
        return Buffer(settings, uids, self.journal, self.clock, rows_digest=self.rows_digest)

    def crash(self, synced: bool = True) -> Buffer:
        """Kill the buffer's process and start another one."""
        if synced:
            self.journal.sync()
        self.buffer = self.generator.buffer = self.opened()
        return self.buffer

    def batch(self) -> MiniBatch:
        answer = self.buffer.lease(self.trainer_incarnation)
        assert isinstance(answer, MiniBatch), answer
        return answer

    def later(self, seconds: float) -> None:
        """Let time pass; the buffer applies its deadlines."""
        self.clock.now += seconds
        self.buffer.tick()

    def play(
        self, groups: int, version: PolicyVersion = START, rewards: Sequence[float] = (1.0, 0.0)
    ) -> list[Assignment]:
        """Claim groups, and finish them in order."""
        works = [self.generator.claimed(version) for _ in range(groups)]
        for work in works:
            self.generator.finish(work, version, rewards)
        return works

    def job(self) -> BatchJob:
        """Begin to form a mini-batch."""
        job = self.buffer.begin_lease(self.trainer_incarnation)
        assert isinstance(job, BatchJob)
        return job

    def train(self) -> MiniBatch:
        """Lease, train and commit one mini-batch."""
        batch = self.batch()
        version = PolicyVersion(self.buffer.version.incarnation, self.buffer.version.step + 1)
        assert self.buffer.commit(self.trainer_incarnation, batch.lease, version) is None
        return batch

    def closes(self) -> bool:
        status = self.buffer.status()
        return status.accepted_tokens == sum(status.tokens.values())

    def replayed(self, step: int) -> MiniBatch:
        """The mini-batch of an optimizer step, formed again from the journal."""
        return replayed(message_limits(self.settings), batch_settings(self.settings), self.folder, step)
