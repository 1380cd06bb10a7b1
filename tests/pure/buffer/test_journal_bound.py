"""A journal at the smallest bound that the configuration check accepts: no run waits for the disk for ever."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from service.config import Config
from service.config.core_settings import worst_bytes
from service.handoff.steps.values import FAILURES
from service.handoff.verbs import Assignment, Wait, WaitReason
from service.types import Refusal, Step, TrajectoryEnd, TrajectoryId
from tests.invariant import fingerprint, violations
from tests.pure.buffer.test_group_bytes import full_step, is_accepted, with_bounds
from tests.pure.buffer.world import Generator, World, config, journal_bytes

ROUNDS = 40
"""Claims, each followed by a sync, within which a full journal is rid of everything that is not needed."""
FATES = ("trained", "filtered", "generator_dies", "refused", "failed", "expired")
TURNS = 2
STEPS = 60


@st.composite
def least_journals(draw: st.DrawFn) -> Config:
    made = config(
        env={"max_turns": TURNS},
        generator={"max_input_length": draw(st.integers(1000, 4000)), "max_generate_length": 100},
        algorithm={"filter_zero_variance": True},
        buffer={
            "lookahead": draw(st.integers(0, 2)),
            "order": draw(st.sampled_from(["finished_first", "strict"])),
            "max_attempts": draw(st.integers(1, 3)),
            "group_deadline": 50.0,
            "step_deadline": 1000.0,
        },
        trainer={
            "mini_batch_size": draw(st.integers(1, 2)),
            "max_tokens_per_micro_batch": 16384,
            "checkpoint_every": draw(st.integers(0, 2)),
            "keep_checkpoints": draw(st.integers(1, 2)),
        },
    )
    made = with_bounds(made, max_group_bytes=worst_bytes(made).group, max_bytes=20 * worst_bytes(made).group)
    return with_bounds(made, max_journal_bytes=journal_bytes(made))


class Run:
    """Plays, trains and writes checkpoints; what becomes of each group is drawn."""

    def __init__(self, folder: Path, made: Config, seed: int) -> None:
        self.world, self.made = World(folder, made, segment_bytes=1 << 30), made
        self.rng = np.random.default_rng(seed)
        self.fates = self.rng.permutation(FATES)[: self.rng.integers(1, len(FATES) + 1)].tolist()
        self.works: list[Assignment] = []
        self.checkpoints: list[int] = []

    def goes_on(self) -> bool:
        """Claim, or else play, or else train; whether any of this was possible."""
        answer = self.claim()
        if isinstance(answer, Assignment):
            self.works.append(answer)
        if self.works and (not isinstance(answer, Assignment) or self.rng.random() < 0.7):
            self.play(
                self.works.pop(self.rng.integers(len(self.works))), str(self.rng.choice([*self.fates, "trained"]))
            )
        elif not isinstance(answer, Assignment):
            return self.train()
        return True

    def claim(self) -> Assignment | Wait | Refusal:
        for _ in range(ROUNDS):
            answer = self.world.generator.claim(self.world.buffer.version)
            if not isinstance(answer, Wait) or answer.reason is not WaitReason.DISK:
                break
            self.world.journal.sync()
        return answer

    def train(self) -> bool:
        buffer, trainer = self.world.buffer, self.made.trainer
        if buffer.status().groups["complete"] < trainer.mini_batch_size:
            return False
        self.world.train()
        if trainer.checkpoint_every and buffer.version.step % trainer.checkpoint_every == 0:
            self.checkpoints = [*self.checkpoints, buffer.version.step][-trainer.keep_checkpoints :]
            buffer.covered(buffer.version.step, self.checkpoints[0])
        return True

    def play(self, work: Assignment, fate: str) -> None:
        """Every sample takes every turn at full length, in a message each; then the group's fate shows."""
        buffer, last = self.world.buffer, work.samples[-1]
        for sample, attempt in zip(work.samples, work.attempts, strict=True):
            of = TrajectoryId(work.group_id, sample, attempt)
            for index in range(TURNS):
                self.send([full_step(of, work.prompt_uid, index, self.made, buffer.version)], [])
            if fate == "failed" and sample == last:
                self.send([], [TrajectoryEnd(of, work.prompt_uid, TURNS, min(FAILURES), 0.0)])
            elif fate == "refused" and sample == last:
                self.send([], [TrajectoryEnd(of, work.prompt_uid, TURNS - 1, "stop", 0.0)])
            elif fate not in ("generator_dies", "expired"):
                self.send([], [TrajectoryEnd(of, work.prompt_uid, TURNS, "stop", sample * (fate != "filtered"))])
        if fate == "generator_dies":
            buffer.leave(self.world.generator.name, self.world.generator.incarnation, "crashed")
            self.world.generator, self.works = Generator(buffer), []
        elif fate == "expired":
            self.world.clock.now += self.made.buffer.group_deadline
            buffer.tick()
            self.works = [other for other in self.works if other.group_id in buffer.ledger.state.groups]

    def send(self, steps: list[Step], ends: list[TrajectoryEnd]) -> None:
        self.world.generator.send(steps, ends)
        journal = self.world.journal
        assert journal.position - journal.start <= self.made.buffer.max_journal_bytes


@settings(deadline=None, max_examples=15)
@given(least_journals(), st.integers(0, 1 << 16))
def test_a_run_whose_groups_end_in_any_way_never_waits_for_the_disk_for_ever(made: Config, seed: int) -> None:
    assert is_accepted(made)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), made, seed)
        for _ in range(STEPS):
            assert run.goes_on(), run.world.buffer.status().waits
        before = fingerprint(run.world.buffer.ledger)
        assert fingerprint(run.world.crash().ledger) == before
        assert not violations(run.world.buffer.ledger) and run.world.closes()
