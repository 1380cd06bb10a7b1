"""A full journal is tidied up: what is needed of its oldest part is copied forward, bit for bit, and the rest goes."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from service.config.core_settings import worst_bytes
from service.handoff.scoring import Answer
from service.handoff.verbs import Assignment, Wait, WaitReason
from service.types import MiniBatch, TrajectoryEnd, TrajectoryId
from tests.pure.buffer.test_group_bytes import full_step, is_accepted, with_bounds
from tests.pure.buffer.world import START, World, config, journal_bytes, no_room_for_new_files


def opened(folder: Path, scorers: dict[str, Any]) -> World:
    """A journal as small as the check accepts, which keeps everything that it removes beside itself."""
    made = config(
        generator={"max_input_length": 4000, "max_generate_length": 100},
        algorithm={"filter_zero_variance": True},
        trainer={"checkpoint_every": 2, "keep_checkpoints": 1, "max_tokens_per_micro_batch": 8192},
        scorers=scorers,
    )
    made = with_bounds(made, max_group_bytes=worst_bytes(made).group)
    made = with_bounds(made, max_journal_bytes=journal_bytes(made))
    assert is_accepted(made)
    return World(folder, made, segment_bytes=1 << 30)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return opened(tmp_path, {})


def play(world: World, work: Assignment, rewards: tuple[float, float]) -> None:
    version = world.buffer.version
    for sample, reward in zip(work.samples, rewards, strict=True):
        of = TrajectoryId(work.group_id, sample)
        for index in range(2):
            world.generator.send([full_step(of, work.prompt_uid, index, world.settings, version)])
        world.generator.send([], [TrajectoryEnd(of, work.prompt_uid, 2, "stop", reward)])
    for group_id in world.buffer.scoring.pending("judge"):
        assert world.buffer.scoring.accept(group_id, "judge", Answer((2 * rewards[0], 2 * rewards[1]))) is None


def fill_until_moved(world: World) -> None:
    """Play filtered groups until the journal begins behind everything that it held, and claims are still answered."""
    world.journal.sync()
    before = world.journal.position
    while world.journal.start < before:
        work = world.generator.claim(world.buffer.version)
        if isinstance(work, Assignment):
            play(world, work, (1.0, 1.0))
        else:
            assert isinstance(work, Wait) and work.reason is WaitReason.DISK
        world.journal.sync()


def same(one: MiniBatch, other: MiniBatch) -> bool:
    pairs = zip((m for rank in one.ranks for m in rank), (m for rank in other.ranks for m in rank), strict=True)
    if one.groups != other.groups or not np.array_equal(one.return_G, other.return_G):
        return False
    return all(np.array_equal(a.token_ids_N, b.token_ids_N) for a, b in pairs)


@pytest.mark.parametrize("scorers", [{}, {"judge": {"use": "mine:judge"}}])
def test_groups_that_were_copied_are_leased_again_as_they_were(tmp_path: Path, scorers: dict[str, Any]) -> None:
    world = opened(tmp_path, scorers)
    for _ in range(2):
        play(world, world.generator.claimed(), (1.0, 0.0))
    batch = world.train()
    fill_until_moved(world)
    world.crash()
    world.trainer_incarnation = world.buffer.join("trainer", "trainer", START.step)
    assert same(world.batch(), batch)
    assert same(world.replayed(1), batch)


def test_a_group_that_was_copied_while_it_grows_is_finished_after_a_crash(world: World) -> None:
    work = world.generator.claimed()
    of = TrajectoryId(work.group_id, 0)
    steps = [full_step(of, work.prompt_uid, index, world.settings, START) for index in range(4)]
    for step in steps[:3]:
        world.generator.send([step])
    fill_until_moved(world)
    world.crash()
    world.generator.send(steps, [TrajectoryEnd(of, work.prompt_uid, 4, "stop", 1.0)])
    other = TrajectoryId(work.group_id, 1)
    world.generator.send(
        [full_step(other, work.prompt_uid, 0, world.settings, START)],
        [TrajectoryEnd(other, work.prompt_uid, 1, "stop", 0.0)],
    )
    group = world.buffer.complete_group(work.group_id).steps
    found = sorted(zip(group.sample_K.tolist(), group.index_K.tolist(), strict=True))
    assert found == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]


def test_copies_whose_snapshot_did_not_reach_the_disk_count_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        play(world, world.generator.claimed(), (1.0, 0.0))
    n_bytes, batch = world.buffer.status().n_bytes, world.train()
    while isinstance(work := world.generator.claim(world.buffer.version), Assignment):
        play(world, work, (1.0, 1.0))
        world.journal.sync()
    no_room_for_new_files(monkeypatch)
    world.journal.sync()
    assert world.journal.stalled
    world.crash(synced=False)
    world.trainer_incarnation = world.buffer.join("trainer", "trainer", START.step)
    assert same(world.batch(), batch)
    assert world.buffer.status().n_bytes == n_bytes


def test_a_snapshot_as_long_as_a_segment_is_not_written_again_at_every_event(tmp_path: Path) -> None:
    segment_bytes, n_times = 2000, 20
    world = World(tmp_path, config(buffer={"lookahead": n_times}), segment_bytes=segment_bytes)
    for _ in range(n_times):
        world.generator.claimed()
    assert len(msgspec.msgpack.encode(world.buffer.ledger.state)) > segment_bytes
    world.journal.sync()
    before = world.journal.position
    for _ in range(2 * n_times):
        world.buffer.join("trainer", "trainer")
    world.journal.sync()
    assert world.journal.position - before < n_times * len(msgspec.msgpack.encode(world.buffer.ledger.state))
