from pathlib import Path

import msgspec
import numpy as np
import pytest

from service.errors import RunFailed, UserError
from service.handoff.steps.wire import encode_mini_batch
from service.handoff.verbs import Wait, WaitReason
from service.rollout.environment import Message, Task
from service.rollout.prompts.dataset import rows_digest
from service.types import PolicyVersion, TrajectoryId
from tests.invariant import fingerprint, violations
from tests.pure.buffer import world as buffer_world
from tests.pure.buffer.world import Generator, World, config, no_room_for_new_files, step
from tests.pure.handoff.test_columns import supported
from tests.recorded import KEPT


@pytest.fixture(params=["one segment", "a snapshot after every frame", "supports"])
def world(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    made = config(algorithm={"filter_zero_variance": True})
    if request.param == "supports":  # of most steps
        monkeypatch.setattr(buffer_world, "step", lambda *of: supported(step(*of)))
        made = config(algorithm={"filter_zero_variance": True}, generator={"top_k": 20})
    return World(tmp_path, made, segment_bytes=1 << 20 if request.param == "one segment" else 1)


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
    has_supports = world.batch().ranks[0][0].support_U is not None
    assert has_supports == (world.settings.generator.top_k > 0)
    assert world.train().groups == (3, 4)


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
    assert len(msgspec.msgpack.encode(world.buffer.ledger.state)) < 2_000
    world.crash()
    assert world.buffer.version == PolicyVersion(1, 60)
    assert world.buffer.status().groups["stepped"] == 120
    world.buffer.covered(60)
    assert world.buffer.status().ended == {"trained": 120}
    assert world.closes() and violations(world.buffer.ledger) == []


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
    assert Generator(world.buffer).claimed().group_id == 1
    assert world.buffer.status().draining is None
    world.buffer.resume()
    assert violations(world.buffer.ledger) == []


def test_a_trainer_cannot_go_on_from_a_step_that_the_journal_does_not_know(tmp_path: Path) -> None:
    world = World(tmp_path, config(trainer={"checkpoint_every": 1}))
    for unknown in (-1, 1):
        with pytest.raises(RunFailed, match=f"step {unknown}, but the journal holds the steps 0 to 0"):
            world.buffer.join("trainer", "trainer", step=unknown)
    before = fingerprint(world.buffer.ledger)
    assert fingerprint(world.crash().ledger) == before


def test_steps_stay_in_the_journal_until_the_snapshot_that_needs_them_no_more_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, segment_bytes=1)
    for _ in range(2):
        world.play(1)
        world.journal.sync()
    no_room_for_new_files(monkeypatch)
    world.train()
    while not world.journal.stalled:
        world.buffer.join("generator", "another")
        world.journal.sync()
    world.crash(synced=False)
    assert world.batch().groups == (0, 1)


@pytest.mark.parametrize("segment_bytes", [1 << 20, 10_000])
def test_every_mini_batch_of_a_run_is_formed_again_from_the_journal_bit_by_bit(
    tmp_path: Path, segment_bytes: int
) -> None:
    settings = config(trainer={"checkpoint_every": 2}, algorithm={"filter_zero_variance": True})
    world, trained = World(tmp_path, settings, segment_bytes=segment_bytes), list[bytes]()
    for n in range(6):
        version = PolicyVersion(world.trainer_incarnation, n)
        world.play(1, version, rewards=(1.0, 1.0))
        for _ in range(2):
            world.generator.claimed(version)
            world.later(11)
            world.generator.finish(world.generator.claimed(version), version, turns=1 + n % 3)
        trained.append(encode_mini_batch(world.batch()))
        world.train()
        if n % 2:
            world.buffer.covered(n + 1)
        world.journal.sync()
    assert (tmp_path / KEPT).is_dir() == (segment_bytes < 1 << 20)
    assert [encode_mini_batch(world.replayed(n)) for n in range(1, 7)] == trained
