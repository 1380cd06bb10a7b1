from pathlib import Path

import pytest

from service.handoff.ledger.state import bucket
from service.handoff.verbs import Assignment, Wait, WaitReason
from service.types import PolicyVersion, TrajectoryId
from tests.invariant import violations
from tests.pure.buffer.world import World, config, journal_bytes, step


def half_finished(world: World, samples: int) -> Assignment:
    """A group of three of which only some samples are finished; the last one has a step."""
    work = world.generator.claimed()
    for sample in range(samples):
        world.generator.play(work, sample, reward=float(sample))
    world.generator.send([step(TrajectoryId(work.group_id, 2), work.prompt_uid, 0)])
    return work


def world_with(tmp_path: Path, max_attempts: int = 3) -> World:
    buffer = {"group_deadline": 50.0, "step_deadline": 1000.0, "max_attempts": max_attempts}
    return World(tmp_path, config(buffer=buffer, algorithm={"n_samples_per_prompt": 3}))


def test_at_its_deadline_a_group_is_trained_with_the_trajectories_that_finished(tmp_path: Path) -> None:
    world = world_with(tmp_path)
    for _ in range(2):
        half_finished(world, samples=2)
    world.later(49)
    assert world.buffer.status().groups["complete"] == 0
    world.later(2)
    batch = world.train()
    assert batch.prompt_of_trajectory_G.tolist() == [0, 0, 1, 1]
    assert batch.metrics["reward/avg_raw_reward"] == 0.5
    status = world.buffer.status()
    assert (status.tokens["stepped"], status.tokens["expired"]) == (8, 4)
    assert world.buffer.ledger.state.lengths.given_up[bucket(2)] == 2
    assert world.closes() and violations(world.buffer.ledger) == []


def test_at_its_deadline_a_group_without_two_finished_trajectories_expires(tmp_path: Path) -> None:
    world = world_with(tmp_path)
    half_finished(world, samples=1)
    world.later(51)
    assert world.buffer.status().ended == {"expired/group_deadline": 1}
    assert world.buffer.status().tokens["expired"] == 4


def test_a_journal_at_its_bound_admits_nothing_and_goes_on_when_groups_were_trained(tmp_path: Path) -> None:
    bound = journal_bytes(config()) + 30_000
    world = World(tmp_path, config(buffer={"max_journal_bytes": bound, "lookahead": 200}))
    admitted = []
    while isinstance(answer := world.generator.claim(), Assignment):
        world.generator.finish(answer)
        world.journal.sync()
        admitted.append(answer)
    assert isinstance(answer, Wait) and answer.reason is WaitReason.DISK
    limit = world.buffer.status().journal_limit_bytes
    assert f"{limit} of buffer.max_journal_bytes ({bound}) are for steps" in answer.detail
    world.train()
    world.generator.claim(PolicyVersion(1, 1))
    assert waits_for_disk(world), "the groups that were not trained keep the journal"
    for _ in range(len(admitted) // 2 - 1):
        world.train()
    world.generator.claim(PolicyVersion(1, 1))
    world.journal.sync()
    assert isinstance(world.generator.claim(PolicyVersion(1, 1)), Assignment)
    assert world.journal.start > 0


def waits_for_disk(world: World) -> bool:
    return any(wait.reason == "disk" for wait in world.buffer.status().waits)


def test_trained_lengths_are_compared_with_generated_ones(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.generator.finish(world.generator.claimed(), turns=1)
    world.generator.finish(world.generator.claimed(), turns=4)
    world.generator.finish(world.generator.claimed(), turns=4)
    world.train()
    assert world.buffer.ledger.state.lengths.generated[bucket(2)] == 2
    assert world.buffer.ledger.state.lengths.generated[bucket(8)] == 4
    assert world.buffer.ledger.state.lengths.trained[bucket(8)] == 2
    exported = world.buffer.status().lengths
    assert exported["generated"] == world.buffer.ledger.state.lengths.generated[: bucket(8) + 1]
    assert exported["trained"][bucket(8)] == 2 and exported["loss_tokens"][bucket(8)] == 16
    assert world.buffer.status().length_distance == pytest.approx(1 / 6)
    assert world.buffer.status().token_length_distance == pytest.approx(4 / 20 - 4 / 36)


def test_undone_training_no_longer_counts_in_the_trained_lengths(tmp_path: Path) -> None:
    world = World(tmp_path, config(trainer={"checkpoint_every": 1}))
    for _ in range(2):
        world.play(1)
    world.train()
    world.buffer.join("trainer", "trainer", step=0)
    assert sum(world.buffer.ledger.state.lengths.trained) == sum(world.buffer.ledger.state.lengths.loss_tokens) == 0
