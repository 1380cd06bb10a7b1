"""A trajectory that fails through no fault of the policy gets a new attempt; without any left it is lost alone."""

from pathlib import Path

import pytest

from service.handoff.steps.values import FAILURES, StopReason
from service.handoff.verbs import Assignment, Receipt
from service.types import MiniBatch, TrajectoryEnd, TrajectoryId
from tests.invariant import violations
from tests.pure.buffer.world import World, config, step

ERROR = str(StopReason.ENVIRONMENT_ERROR)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(
        tmp_path, config(algorithm={"n_samples_per_prompt": 3}, buffer={"max_attempts": 2, "max_staleness": 8})
    )


def fail(world: World, work: Assignment, sample: int, reason: str = ERROR, turns: int = 1) -> bytes:
    """Play a sample up to its failure; returns the message."""
    attempt = work.attempts[work.samples.index(sample)]
    of = TrajectoryId(work.group_id, sample, attempt)
    steps = [step(of, work.prompt_uid, index) for index in range(turns)]
    data = world.generator.message(steps, [TrajectoryEnd(of, work.prompt_uid, turns, reason, 1.0)])
    receipt = world.buffer.submit(data)
    assert isinstance(receipt, Receipt) and not receipt.duplicate, receipt
    world.journal.sync()
    return data


def finish(world: World, work: Assignment, *samples: int) -> None:
    places = [work.samples.index(sample) for sample in samples]
    kept = work._replace(samples=samples, attempts=tuple(work.attempts[place] for place in places))
    world.generator.finish(kept)


@pytest.mark.parametrize("reason", sorted(FAILURES))
def test_a_failed_trajectory_alone_starts_anew_and_its_tokens_are_superseded(world: World, reason: str) -> None:
    work = world.generator.claimed()
    finish(world, work, 0, 2)
    fail(world, work, 1, reason, turns=2)
    again = world.generator.claimed()
    assert (again.group_id, again.samples, again.attempts) == (work.group_id, (1,), (1,))
    status = world.buffer.status()
    assert status.restarts == {reason: 1}
    assert status.tokens["superseded"] == 4
    world.generator.finish(again)
    assert world.buffer.status().groups["complete"] == 1
    assert world.closes() and violations(world.buffer.ledger) == []


def test_a_failure_without_any_step_starts_anew(world: World) -> None:
    work = world.generator.claimed()
    fail(world, work, 0, turns=0)
    assert world.generator.claimed().samples == (0,)


def test_a_trajectory_without_lives_is_lost_alone_with_its_reason_and_the_others_are_trained(world: World) -> None:
    work = world.generator.claimed()
    finish(world, work, 0, 2)
    fail(world, work, 1)
    fail(world, world.generator.claimed(), 1, str(StopReason.ENVIRONMENT_TIMEOUT))
    status = world.buffer.status()
    assert status.groups["complete"] == 1
    assert status.given_up == {"environment_timeout": 1}
    world.play(1)
    batch = world.train()
    assert len(batch.advantage_G) == 5
    assert world.closes() and violations(world.buffer.ledger) == []


def test_a_group_of_which_one_trajectory_is_left_is_refused(world: World) -> None:
    work = world.generator.claimed()
    finish(world, work, 0)
    for sample in (1, 2):
        fail(world, work, sample)
    again = world.generator.claimed()
    for sample in (1, 2):
        fail(world, again, sample)
    assert world.buffer.status().ended == {"refused/max_attempts": 1}
    assert world.closes() and violations(world.buffer.ledger) == []


def test_a_lost_sibling_leaves_others_that_wait_for_a_claim_waiting(world: World) -> None:
    work = world.generator.claimed()
    fail(world, work, 1)
    again = world.generator.claimed()
    fail(world, work, 2)
    fail(world, again, 1)
    last = world.generator.claimed()
    assert (last.samples, last.attempts) == ((2,), (1,))
    assert violations(world.buffer.ledger) == []


def test_a_failure_whose_consequence_a_crash_took_away_is_acted_upon_when_it_is_said_again(world: World) -> None:
    work = world.generator.claimed()
    of = TrajectoryId(work.group_id, 1)
    data = world.generator.message([step(of, work.prompt_uid, 0)], [TrajectoryEnd(of, work.prompt_uid, 1, ERROR, 0.0)])
    world.buffer.submit(data)
    first, second = (queued.end for queued in world.journal._queue[-2:])
    del world.journal._queue[-1]
    world.journal.position = first
    assert second > first
    world.crash()
    assert world.buffer.status().restarts == {}
    world.buffer.submit(data)
    assert world.buffer.status().restarts == {ERROR: 1}
    assert violations(world.buffer.ledger) == []


def test_while_the_run_drains_a_group_goes_on_without_what_failed(world: World) -> None:
    works = [world.generator.claimed() for _ in range(2)]
    world.buffer.drain("max_steps")
    for work in works:
        finish(world, work, 0, 1)
        fail(world, work, 2)
    batch = world.buffer.lease(world.trainer_incarnation)
    assert isinstance(batch, MiniBatch) and len(batch.advantage_G) == 4
