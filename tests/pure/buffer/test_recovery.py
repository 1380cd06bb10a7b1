import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from service.errors import RunFailed, UserError
from service.handoff.buffer import Buffer
from service.handoff.journal.disk import Buffer as Bytes
from service.handoff.journal.disk import File
from service.handoff.steps.wire import encode_mini_batch
from service.handoff.verbs import Receipt, Wait, WaitReason
from service.rollout.environment import Message, Task
from service.rollout.prompts.dataset import rows_digest
from service.types import PolicyVersion, TrajectoryEnd, TrajectoryId
from tests.invariant import fingerprint, violations
from tests.pure.buffer.world import World, config, step


@pytest.fixture(params=[1 << 20, 1], ids=["one segment", "a snapshot after every frame"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    return World(tmp_path, config(algorithm={"filter_zero_variance": True}), segment_bytes=request.param)


def eventful(world: World) -> None:
    """A bit of everything: trained, filtered, refused, restarted, leased, half-finished groups."""
    works = [world.generator.claimed() for _ in range(3)]
    for work in works[:2]:
        world.generator.finish(work)
    world.train()
    world.generator.finish(works[2], rewards=(1.0, 1.0))
    works = [world.generator.claimed(PolicyVersion(1, 1)) for _ in range(4)]
    for work in works[:2]:
        world.generator.finish(work, PolicyVersion(1, 1))
    of = TrajectoryId(works[2].group_id, 0)
    world.generator.send([step(of, works[2].prompt_uid, 0, PolicyVersion(1, 1))])
    world.later(11)
    world.generator.claimed(PolicyVersion(1, 1))
    world.batch()


def test_a_replayed_journal_makes_the_same_ledger(world: World) -> None:
    eventful(world)
    before = fingerprint(world.buffer.ledger)
    status = world.buffer.status()
    after = world.crash()
    assert fingerprint(after.ledger) == before
    assert violations(after.ledger) == []
    assert after.status().tokens == status.tokens
    assert after.status().groups == status.groups
    assert after.version == PolicyVersion(1, 1)


def test_an_open_lease_is_given_again_bit_by_bit_after_a_crash(world: World) -> None:
    eventful(world)
    before = encode_mini_batch(world.batch())
    world.crash()
    assert encode_mini_batch(world.batch()) == before
    assert world.train().groups == (3, 4)


def test_deadlines_start_anew_after_a_crash(world: World) -> None:
    world.generator.claimed()
    world.clock.now += 9
    world.crash()
    world.later(9)
    assert world.buffer.status().restarts == {}
    world.later(2)
    assert world.buffer.status().restarts == {"silent": 2}


def test_a_crash_between_completion_and_filter_filters_after_the_restart(tmp_path: Path) -> None:
    world = World(tmp_path, config())
    world.play(1, rewards=(1.0, 1.0))
    world.settings = config(algorithm={"filter_zero_variance": True})
    world.crash()
    assert world.buffer.status().ended == {"filtered/zero_variance": 1}


@pytest.mark.parametrize("segment_bytes", [1 << 20, 1])
def test_groups_given_out_again_after_going_back_come_from_the_journal(tmp_path: Path, segment_bytes: int) -> None:
    world = World(tmp_path, config(trainer={"checkpoint_every": 1}), segment_bytes=segment_bytes)
    work = world.generator.claimed()
    other = world.generator.claimed()
    world.generator.send([step(TrajectoryId(0, 0), work.prompt_uid, 0)])
    world.later(11)
    for _ in range(2):
        world.generator.finish(world.generator.claimed(), turns=3)
    first = world.train()
    world.crash()
    world.trainer_incarnation = world.buffer.join("trainer", "trainer", step=0)
    world.crash()
    world.batch()
    world.crash()
    again = world.train()
    assert again.groups == first.groups == (0, other.group_id)
    assert (again.ranks[0][0].token_ids_N == first.ranks[0][0].token_ids_N).all()
    assert np.isclose(again.advantage_G, first.advantage_G).all()


@pytest.mark.parametrize("rotated", [False, True], ids=["one segment", "after a snapshot"])
@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("algorithm", "n_samples_per_prompt", 3),
        ("trainer", "mini_batch_size", 3),
        ("data", "shuffle", True),
    ],
)
def test_a_resume_with_a_setting_that_the_journal_cannot_follow_is_refused_by_its_name(
    tmp_path: Path, section: str, name: str, value: int, rotated: bool
) -> None:
    world = World(tmp_path, segment_bytes=2_000 if rotated else 1 << 20)
    for _ in range(4):
        world.play(1)
    world.train()
    world.journal.sync()
    changed = getattr(world.settings, section).model_copy(update={name: value})
    world.settings = world.settings.model_copy(update={section: changed})
    with pytest.raises(UserError, match=rf"^{section}\.{name}: it is {value:d}, but was \d+ when this run began"):
        world.opened()


def test_a_resume_on_other_rows_is_refused_although_their_uids_are_the_same(world: World) -> None:
    world.journal.sync()
    world.rows_digest = rows_digest([Task("p0", (Message(role="user", content="another question"),), "")])
    with pytest.raises(UserError, match=r"^data\.train: the dataset has other rows than when this run began"):
        world.opened()
    world.rows_digest, world.n_prompts = "", 7
    with pytest.raises(UserError, match=r"^data\.train"):
        world.opened()


def test_the_journal_stays_small_when_nobody_can_go_back(tmp_path: Path) -> None:
    world = World(tmp_path, segment_bytes=20_000)
    for n in range(60):
        world.play(2, PolicyVersion(1, n))
        world.train()
        world.journal.sync()
        assert world.journal.position - world.journal.start < 60_000
    assert world.journal.position > 300_000
    assert len(world.buffer.ledger.snapshot()) < 2_000
    world.crash()
    assert world.buffer.version == PolicyVersion(1, 60)
    assert world.buffer.status().groups["stepped"] == 120
    world.buffer.covered(60)
    assert world.buffer.status().ended == {"trained": 120}
    assert world.closes() and violations(world.buffer.ledger) == []


def test_the_journal_keeps_what_a_replay_of_its_newest_snapshot_needs(tmp_path: Path) -> None:
    world = World(tmp_path)
    work = world.generator.claimed()
    of = [TrajectoryId(work.group_id, sample) for sample in range(2)]
    world.generator.send([step(of[0], work.prompt_uid, 0), step(of[1], work.prompt_uid, 0)])
    world.journal.sync()
    world.segment_bytes = 1
    world.crash()
    world.generator.claimed()
    world.segment_bytes = 1 << 20
    world.crash()
    for sample in range(2):
        end = TrajectoryEnd(of[sample], work.prompt_uid, 2, "stop", float(sample))
        world.generator.send([step(of[sample], work.prompt_uid, 1)], [end])
    world.play(1)
    world.train()
    world.journal.sync()
    assert fingerprint(world.crash().ledger) == fingerprint(world.buffer.ledger)
    assert world.buffer.version == PolicyVersion(1, 1)


def test_the_journal_keeps_what_a_kept_checkpoint_needs(tmp_path: Path) -> None:
    world = World(tmp_path, config(trainer={"checkpoint_every": 4}), segment_bytes=5_000)
    trained = {}
    for n in range(20):
        world.play(2, PolicyVersion(1, n))
        trained[n + 1] = world.train().groups
        if n % 4 == 3:
            world.buffer.covered(n + 1, oldest_kept=max(n - 7, 0))
        world.journal.sync()
    assert world.journal.start > 0
    world.trainer_incarnation = world.buffer.join("trainer", "trainer", step=12)
    world.crash()
    assert [world.train().groups for _ in range(8)] == [trained[step] for step in range(13, 21)]
    assert world.closes()


def test_a_lease_that_is_open_at_a_crash_has_its_whole_deadline_again(world: World) -> None:
    world.play(2)
    world.batch()
    world.clock.now += 99
    world.crash()
    world.later(99)
    assert world.buffer.status().groups["leased"] == 2
    world.later(2)
    assert world.buffer.status().groups["leased"] == 0


def test_a_run_that_had_ended_issues_prompts_again_when_it_is_resumed(world: World) -> None:
    world.generator.claimed()
    world.buffer.end()
    world.crash()
    assert isinstance(answer := world.generator.claim(), Wait) and answer.reason is WaitReason.DRAINED
    world.buffer.resume()
    world.crash()
    assert world.generator.claimed().group_id == 1
    assert world.buffer.status().draining is None
    world.buffer.resume()
    assert violations(world.buffer.ledger) == []


@pytest.mark.parametrize("segment_bytes", [1 << 20, 1])
def test_what_comes_too_late_for_a_used_group_is_not_in_it_when_it_is_trained_again(
    tmp_path: Path, segment_bytes: int
) -> None:
    world = World(tmp_path, config(trainer={"checkpoint_every": 1}), segment_bytes=segment_bytes)
    used = [world.generator.claimed() for _ in range(2)]
    for work in used:
        world.generator.finish(work)
    open_work, first = world.generator.claimed(), world.train()
    of, late = TrajectoryId(open_work.group_id, 0), TrajectoryId(used[0].group_id, 0)
    steps = [step(of, open_work.prompt_uid, 0), step(late, "another", 0, first=40)]
    answer = world.generator.send(steps, [TrajectoryEnd(late, "another", 4, "stop", 7.0)])
    assert isinstance(answer, Receipt) and answer.late == (late,)
    world.trainer_incarnation = world.buffer.join("trainer", "trainer", step=0)
    again = world.batch()
    assert again.groups == first.groups
    assert again.return_G.tolist() == first.return_G.tolist()
    assert (again.ranks[0][0].token_ids_N == first.ranks[0][0].token_ids_N).all()


def test_the_end_of_a_failed_attempt_is_not_its_end_when_a_crash_took_away_what_followed_from_it(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, segment_bytes=1)
    work = world.generator.claimed()
    of = TrajectoryId(work.group_id, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffer, "_restart_failed", lambda self, message: 0)
        world.generator.send([step(of, work.prompt_uid, 0)], [TrajectoryEnd(of, work.prompt_uid, 1, "abort", 0.0)])
    world.crash()
    answer = world.generator.send([], [TrajectoryEnd(of, work.prompt_uid, 1, "stop", 1.0)])
    assert isinstance(answer, Receipt), answer


def test_a_trainer_cannot_go_on_from_a_step_that_the_journal_does_not_know(tmp_path: Path) -> None:
    world = World(tmp_path, config(trainer={"checkpoint_every": 1}))
    for unknown in (-1, 1):
        with pytest.raises(RunFailed, match=f"step {unknown}, but the journal holds the steps 0 to 0"):
            world.buffer.join("trainer", "trainer", step=unknown)
    before = fingerprint(world.buffer.ledger)
    assert fingerprint(world.crash().ledger) == before


def test_a_resume_with_a_lower_bound_on_messages_leaves_no_steps_out(world: World) -> None:
    work = world.generator.claimed()
    world.generator.finish(work)
    world.journal.sync()
    world.settings = config(buffer={"max_group_bytes": 1000})
    assert len(world.opened().complete_group(work.group_id).steps) == 4


def test_steps_stay_in_the_journal_until_the_snapshot_that_needs_them_no_more_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_for_new_files(self: File, offset: int, buffers: Sequence[Bytes]) -> int:
        if not offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, offset, buffers)

    world, write = World(tmp_path, segment_bytes=1), File.write
    for _ in range(2):
        world.play(1)
        world.journal.sync()
    monkeypatch.setattr(File, "write", full_for_new_files)
    world.train()
    while not world.journal.stalled:
        world.buffer.join("generator", "another")
        world.journal.sync()
    world.crash(synced=False)
    assert world.batch().groups == (0, 1)


def test_steps_undone_by_a_trainer_that_goes_far_back_are_repeated_with_all_their_tokens(tmp_path: Path) -> None:
    """Far beyond `max_staleness`: the groups were generated by versions that the trainer has yet to reach again."""
    checkpoint_every, undone = 20, 15
    world = World(tmp_path, config(trainer={"checkpoint_every": checkpoint_every}, buffer={"max_staleness": 2}))

    def trained(steps: int) -> list[tuple[tuple[int, ...], list[bool], list[int]]]:
        return [
            (batch.groups, batch.ranks[0][0].loss_mask_N.tolist(), batch.ranks[0][0].staleness_N.tolist())
            for batch in (world.train() for _ in range(steps))
        ]

    def generated(steps: int) -> None:
        for _ in range(steps):
            world.generator.finish(world.generator.claimed(world.buffer.version), world.buffer.version)
            world.generator.finish(world.generator.claimed(world.buffer.version), world.buffer.version)
            before.extend(trained(1))

    before: list[tuple[tuple[int, ...], list[bool], list[int]]] = []
    generated(undone)
    world.crash()
    world.trainer_incarnation = world.buffer.join("trainer", "trainer", step=0)
    after = trained(undone)
    assert [(groups, mask) for groups, mask, _ in after] == [(groups, mask) for groups, mask, _ in before]
    assert world.buffer.status().tokens["stale"] == 0 and world.buffer.status().ended.get("refused", 0) == 0
