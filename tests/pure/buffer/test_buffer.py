from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.config.core_settings import worst_bytes
from service.errors import RunFailed
from service.handoff.batches.estimators import ESTIMATORS
from service.handoff.steps import wire
from service.handoff.steps.tables import step_objects
from service.handoff.verbs import LEAVES, Assignment, Receipt, Wait, WaitReason
from service.types import (
    Float64s,
    Int64s,
    MiniBatch,
    PolicyVersion,
    Refusal,
    RefusalReason,
    TrajectoryEnd,
    TrajectoryId,
)
from tests.invariant import violations
from tests.pure.buffer.world import START, Generator, World, config, step


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def consistent(world: World) -> bool:
    return world.closes() and violations(world.buffer.ledger) == []


def refused(answer: object) -> RefusalReason:
    assert isinstance(answer, Refusal), answer
    return answer.reason


def waits(answer: object) -> WaitReason:
    assert isinstance(answer, Wait), answer
    return answer.reason


# -- order --------------------------------------------------------------------------------------------------------


def test_a_mini_batch_holds_the_groups_that_finished_first(world: World) -> None:
    first, second, third = (world.generator.claimed() for _ in range(3))
    world.generator.finish(third)
    world.generator.finish(first)
    assert world.batch().groups == (third.group_id, first.group_id)
    assert second.group_id == 1


def test_in_strict_order_a_mini_batch_waits_for_the_next_slots(tmp_path: Path) -> None:
    world = World(tmp_path, config(buffer={"order": "strict"}))
    first, second, third = (world.generator.claimed() for _ in range(3))
    world.generator.finish(third)
    world.generator.finish(first)
    answer = world.buffer.lease(world.trainer_incarnation)
    assert waits(answer) is WaitReason.SLOT
    assert "group=1/sample=0/attempt=0 after 0 steps on g1" in answer.detail
    world.generator.finish(second)
    assert world.batch().groups == (0, 1)


def test_a_slot_vacated_under_strict_order_passes_to_the_next_group(tmp_path: Path) -> None:
    world = World(tmp_path, config(buffer={"order": "strict", "max_attempts": 1}))
    works = [world.generator.claimed() for _ in range(3)]
    for work in works[1:]:
        world.generator.finish(work)
    world.later(11)
    assert world.batch().groups == (1, 2)


# -- admission ----------------------------------------------------------------------------------------------------


def test_lookahead_zero_is_strictly_on_policy(tmp_path: Path) -> None:
    world = World(tmp_path, config(buffer={"lookahead": 0}))
    world.play(2)
    assert waits(world.generator.claim()) is WaitReason.LOOKAHEAD
    world.train()
    assert waits(world.generator.claim()) is WaitReason.LOOKAHEAD, "the engine still serves the old version"
    works = [world.generator.claimed(PolicyVersion(1, 1)) for _ in range(2)]
    for work in works:
        world.generator.finish(work, PolicyVersion(1, 1))
    assert world.train().metrics["async/staleness_max"] == 0


def test_filtered_groups_vacate_their_slots(tmp_path: Path) -> None:
    world = World(tmp_path, config(algorithm={"filter_zero_variance": True}))
    for _ in range(20):
        world.play(1, rewards=(1.0, 1.0))
    status = world.buffer.status()
    assert status.groups["filtered"] == 20 and world.buffer.ledger.next_slot == 0
    assert status.tokens["filtered"] == status.accepted_tokens == 20 * 2 * 2 * 2
    assert consistent(world)


def test_rewards_of_filtered_groups_count_in_the_next_mini_batch(tmp_path: Path) -> None:
    world = World(tmp_path, config(algorithm={"filter_zero_variance": True}))
    world.play(1, rewards=(1.0, 1.0))
    world.play(1, rewards=(0.0, 0.0))
    for _ in range(2):
        world.play(1, rewards=(1.0, 0.0))
    metrics = world.train().metrics
    assert metrics["reward/avg_raw_reward"] == 0.5
    assert metrics["reward/avg_pass_at_2"] == 0.75
    assert metrics["generate/filtered_groups"] == 2
    assert metrics["reward/groups_without_variance"] == 0.5
    assert metrics["reward/groups_all_zero"] == metrics["reward/groups_all_one"] == 0.25
    for _ in range(2):
        world.play(1, rewards=(1.0, 0.0))
    assert world.train().metrics["generate/filtered_groups"] == 0


def test_a_lease_says_that_every_group_was_filtered_and_when_no_other_is_to_be_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.handoff.leases.FRUITLESS_GROUPS", 5)
    monkeypatch.setattr("service.handoff.leases.FRUITLESS_MINI_BATCHES", 2)
    world = World(tmp_path, config(algorithm={"filter_zero_variance": True}))
    for reason in (*[WaitReason.GROUPS] * 4, WaitReason.FILTERED):
        world.play(1, rewards=(1.0, 1.0))
        answer = world.buffer.lease(world.trainer_incarnation)
        assert waits(answer) is reason
    assert answer.detail == "5 groups finished, all filtered: every return was 1.0"
    world.play(1)
    assert waits(world.buffer.lease(world.trainer_incarnation)) is WaitReason.GROUPS, "one is left to learn from"


def test_worst_case_bytes_are_reserved_at_the_claim(tmp_path: Path) -> None:
    worst = worst_bytes(config()).group
    world = World(tmp_path, config(buffer={"max_bytes": 2 * worst + worst // 2, "lookahead": 4}))
    first, second = world.generator.claimed(), world.generator.claimed()
    answer = world.generator.claim()
    assert waits(answer) is WaitReason.BYTES
    world.generator.finish(first, turns=1)
    assert isinstance(world.generator.claim(), Assignment), "a finished group holds only what it really takes"
    world.generator.finish(second)
    assert world.buffer.status().reserved_bytes <= 2 * worst + worst // 2


def test_the_dataset_wraps_with_new_group_ids_and_a_new_order(tmp_path: Path) -> None:
    world = World(tmp_path, config(data={"shuffle": True}, buffer={"lookahead": 50}), n_prompts=8)
    works = [world.generator.claimed() for _ in range(16)]
    assert [work.group_id for work in works] == list(range(16))
    first, second = [work.row for work in works[:8]], [work.row for work in works[8:]]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert all(work.prompt_uid == f"p{work.row}" for work in works)


# -- acceptance ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "engines", "wanted"),
    [("finished_first", 1, [3, 2, 1, 4]), ("finished_first", 2, [1, 1, 1, 2]), ("strict", 1, [1] * 4)],
)
def test_a_receipt_says_how_many_complete_groups_the_next_mini_batch_lacks(
    order: str, engines: int, wanted: list[int], tmp_path: Path
) -> None:
    world = World(
        tmp_path, config(trainer={"mini_batch_size": 4}, buffer={"order": order}, generator={"engines": engines})
    )
    said = []
    for _ in wanted:
        work = world.generator.claimed()
        world.generator.finish(work)
        receipt = world.generator.send([step(TrajectoryId(work.group_id, 0), work.prompt_uid, 0)])
        assert isinstance(receipt, Receipt)
        said.append(receipt.wanted)
    assert said == wanted


def test_what_nobody_was_asked_for_is_refused_with_its_reason_and_counted(world: World) -> None:
    work, send = world.generator.claimed(), world.generator.send
    uid = work.prompt_uid
    world.generator.play(work, 1)
    answers = {
        RefusalReason.UNKNOWN_GROUP: [send([step(TrajectoryId(5, 0), "p5", 0)])],
        RefusalReason.IDENTITY: [
            send([step(TrajectoryId(0, 0), "p7", 0)]),
            send([step(TrajectoryId(0, 0, 1), uid, 0)]),
        ],
        RefusalReason.STEP_ORDER: [send([step(TrajectoryId(0, 1), uid, 1)])],
        RefusalReason.VERSION: [world.generator.claim(PolicyVersion(1, 7))],
        RefusalReason.MALFORMED: [world.buffer.submit(b"not a message")],
    }
    assert all(refused(answer) is reason for reason, group in answers.items() for answer in group)
    assert world.buffer.status().refused == {str(reason): len(group) for reason, group in answers.items()}


def test_versions_never_published_or_older_than_the_admission_are_refused(world: World) -> None:
    world.play(2)
    world.train()
    newer = world.generator.claimed(PolicyVersion(1, 1))
    of = TrajectoryId(newer.group_id, 0)
    too_old = step(of, newer.prompt_uid, 0, START)
    assert refused(world.generator.send([too_old])) is RefusalReason.VERSION
    of = TrajectoryId(newer.group_id, 1)
    assert refused(world.generator.send([step(of, newer.prompt_uid, 0, PolicyVersion(1, 9))])) is RefusalReason.VERSION


# -- fencing ------------------------------------------------------------------------------------------------------


def test_an_old_incarnation_of_a_generator_cannot_write_and_its_work_goes_on_elsewhere(world: World) -> None:
    work = world.generator.claimed()
    stale_message = world.generator.message([step(TrajectoryId(0, 0), work.prompt_uid, 0)])
    reborn = Generator(world.buffer, "g1")
    assert refused(world.buffer.submit(stale_message)) is RefusalReason.FENCED
    again = reborn.claimed()
    assert (again.group_id, again.samples, again.attempts) == (0, (0, 1), (1, 1))


@pytest.mark.parametrize("how", ["leaves", "rejoins"])
def test_what_a_generator_of_sessions_left_unfinished_moves_with_the_steps_that_were_accepted(
    world: World, how: str
) -> None:
    first, second = Generator(world.buffer, "g2", resumes=True), Generator(world.buffer, "g3", resumes=True)
    work = first.claimed()
    of = TrajectoryId(work.group_id, 1)
    steps = [replace(step(of, work.prompt_uid, index), note=f"note {index}") for index in range(2)]
    assert isinstance(first.send(steps), Receipt)
    stale_message = first.message([step(of, work.prompt_uid, 2)])
    assert isinstance(second.claim(only_moved=True), Wait)
    if how == "leaves":
        world.buffer.leave("g2", None, "failed")
    else:
        Generator(world.buffer, "g2", resumes=True)
    buffer = second.buffer = world.crash()
    assert refused(buffer.submit(stale_message)) is RefusalReason.FENCED
    assert buffer.ledger.continues(of) and not buffer.ledger.continues(of._replace(attempt=1))
    moved = second.claim(only_moved=True)
    assert isinstance(moved, Assignment) and moved.moved == work.samples
    assert moved._replace(steps=(), moved=()) == work
    none, both = moved.steps
    assert not none
    assert [made.note for made in step_objects(wire.accepted_group(both).steps)] == ["note 0", "note 1"]
    kept = [*steps[0].prompt_ids, *steps[0].response_ids, *range(15, 20)]
    assert wire.accepted_group(both).steps.token_ids_N.tolist() == kept
    end = TrajectoryEnd(of, work.prompt_uid, 3, "stop", 1.0)
    assert isinstance(second.send([step(of, work.prompt_uid, 2)], [end]), Receipt)
    assert buffer.ledger.state.groups[work.group_id].trajectories[1].complete and world.closes()
    assert not buffer.ledger.continues(of) and buffer.ledger.continues(of._replace(sample=0))
    world.later(11)  # the other one is silent, and begins anew
    assert isinstance(second.claim(only_moved=True), Wait)
    again = second.claimed()
    assert (again.samples, again.attempts, again.moved) == ((0,), (1,), ())


def test_a_request_of_which_every_generator_dies_ends_its_group_with_the_reason_and_the_run_goes_on(
    world: World,
) -> None:
    one, other = (Generator(world.buffer, name, resumes=True) for name in ("g2", "g3"))
    work = one.claimed()
    of = TrajectoryId(work.group_id, 0)
    for index in range(3):  # a generator that dies after a step did not die of the session
        both = [step(of._replace(sample=sample), work.prompt_uid, index) for sample in work.samples]
        assert isinstance(one.send(both), Receipt)
        world.buffer.renew(one.name, one.incarnation, [of], call=True)
        world.buffer.leave(one.name, None, "failed")
        assert other.claimed().moved == work.samples
        one, other = other, Generator(world.buffer, one.name, resumes=True)
    world.buffer.leave(one.name, None, LEAVES)
    assert other.claimed().moved == work.samples
    buffer = world.crash()
    for name in ("g4", "g5"):
        other.buffer = buffer
        buffer.renew(other.name, other.incarnation, [of], call=True)
        buffer.leave(other.name, None, "failed")
        assert buffer.ledger.continues(of) is (name == "g4")
        other = Generator(buffer, name, resumes=True)
        assert other.claimed().moved == (work.samples if name == "g4" else ())
    assert buffer.status().ended == {"refused/max_attempts": 1} and world.closes()


def test_a_session_that_only_waited_outlives_generators_that_die_of_others(world: World) -> None:
    one = Generator(world.buffer, "g2", resumes=True)
    idle, guilty = one.claimed(), one.claimed()
    for number in range(5):  # more than buffer.max_attempts
        world.buffer.renew(one.name, one.incarnation, [TrajectoryId(guilty.group_id, 0)], call=True)
        world.buffer.leave(one.name, None, "failed")
        one = Generator(world.buffer, f"next-{number}", resumes=True)
        assert one.claimed()._replace(moved=()) == idle
        one.claimed()
    assert world.buffer.status().ended == {"refused/max_attempts": 1} and world.closes()


def test_a_session_on_its_last_attempt_outlives_one_generator(world: World) -> None:
    samples = world.generator.claimed().samples
    world.buffer.leave(world.generator.name, None, "failed")
    for name, attempt, moved in (("g2", 1, ()), ("g3", 2, ()), ("g4", 2, samples)):
        one = Generator(world.buffer, name, resumes=attempt == 2)
        work = one.claimed()
        assert (work.attempts, work.moved) == ((attempt,) * len(samples), moved)
        world.buffer.renew(name, one.incarnation, [of for of, _ in work.trajectories()], call=True)
        world.buffer.leave(name, None, "failed")
    assert world.buffer.status().ended == {"refused/max_attempts": 1} and world.closes()


def test_the_first_generator_of_a_resumed_run_takes_over_the_sessions_of_all(world: World) -> None:
    ones = [Generator(world.buffer, name, resumes=True) for name in ("g2", "g3")]
    works = [one.claimed() for one in ones]
    buffer = world.crash()
    buffer.resume()
    first = Generator(buffer, "g3", resumes=True)
    assert [first.claimed().moved for _ in works] == [work.samples for work in works]
    assert all(each.deaths == 0 for work in works for each in buffer.ledger.state.groups[work.group_id].trajectories)


def test_a_trajectory_that_its_generator_renews_is_not_silent(world: World) -> None:
    work = world.generator.claimed()
    waiting = TrajectoryId(work.group_id, 0)
    for _ in range(3):
        world.clock.now += 6
        world.buffer.renew(
            "g1", world.generator.incarnation, [waiting, TrajectoryId(99, 0), waiting._replace(attempt=1)]
        )
        world.buffer.renew("g1", 7, [TrajectoryId(work.group_id, 1)])
        world.buffer.tick()
    assert world.generator.claimed().samples == (1,)


def test_a_generator_that_left_is_fenced_until_it_joins_again(world: World) -> None:
    world.buffer.leave("g1", world.generator.incarnation, "its process died")
    assert refused(world.generator.claim()) is RefusalReason.FENCED


def test_an_old_trainer_cannot_lease_commit_or_release(world: World) -> None:
    world.play(2)
    lease = world.batch().lease
    old = world.trainer_incarnation
    world.trainer_incarnation = world.buffer.join("trainer", "trainer")
    assert refused(world.buffer.lease(old)) is RefusalReason.FENCED
    assert refused(world.buffer.commit(old, lease, PolicyVersion(1, 1))) is RefusalReason.FENCED
    assert refused(world.buffer.release(old, lease, "late")) is RefusalReason.FENCED
    assert world.batch().groups == (0, 1)


# -- deadlines and attempts ---------------------------------------------------------------------------------------


def test_a_silent_trajectory_alone_restarts_as_its_next_attempt(world: World) -> None:
    work = world.generator.claimed()
    for _ in range(3):
        world.clock.now += 6
        world.generator.send([step(TrajectoryId(work.group_id, 0), work.prompt_uid, _)])
        world.buffer.tick()
    again = world.generator.claimed()
    assert (again.group_id, again.samples, again.attempts) == (work.group_id, (1,), (1,))
    assert isinstance(world.generator.claim(), Assignment)
    assert world.generator.claimed().group_id == 2


def test_a_sample_that_waits_for_a_claim_is_played_by_nobody_after_the_end_of_its_group(tmp_path: Path) -> None:
    world = World(tmp_path, config(buffer={"group_deadline": 60.0, "order": "strict"}))
    work = world.generator.claimed()
    world.buffer.leave(world.generator.name, None, "failed")  # both samples wait
    world.later(61)
    assert world.buffer.ledger.unassigned == {}
    other = Generator(world.buffer, "g2").claimed()
    assert other.group_id != work.group_id and other.attempts == (0, 0)


def test_late_steps_of_a_replaced_attempt_are_acknowledged_and_not_used(world: World) -> None:
    """The generator stops that attempt, and goes on with the other trajectories of the group."""
    work = world.generator.claimed()
    of, sibling = TrajectoryId(work.group_id, 1), TrajectoryId(work.group_id, 0, 1)
    world.generator.send([step(of, work.prompt_uid, 0)])
    world.later(11)
    again = world.generator.claimed()
    assert again.trajectories
    answer = world.generator.send([step(of, work.prompt_uid, 1), step(sibling, work.prompt_uid, 0)])
    assert isinstance(answer, Receipt) and answer.late == (of,)
    status = world.buffer.status()
    assert (status.tokens["superseded"], status.tokens["open"], status.late) == (2, 2, 1)
    assert consistent(world)


def test_a_restarted_trajectory_is_not_given_to_an_engine_older_than_its_group(world: World) -> None:
    world.play(2)
    world.train()
    world.generator.claimed(PolicyVersion(1, 1))
    world.later(11)
    behind = Generator(world.buffer, "g2")
    assert behind.claimed(START).attempts == (0, 0)
    assert behind.claimed(PolicyVersion(1, 1)).attempts == (1, 1)


def test_an_overdue_lease_is_given_out_again_and_its_commit_refused(world: World) -> None:
    world.play(2)
    first = world.batch()
    world.later(101)
    second = world.batch()
    assert second.groups == first.groups and second.lease != first.lease
    late = world.buffer.commit(world.trainer_incarnation, first.lease, PolicyVersion(1, 1))
    assert refused(late) is RefusalReason.LEASE


def test_groups_that_used_up_their_leases_are_refused(world: World) -> None:
    world.play(2)
    for _ in range(3):
        assert world.buffer.release(world.trainer_incarnation, world.batch().lease, "the loss was not finite") is None
    assert world.buffer.status().ended == {"refused/max_lease_attempts": 2}
    assert waits(world.buffer.lease(world.trainer_incarnation)) is WaitReason.GROUPS
    assert consistent(world)


def test_the_groups_of_a_released_lease_come_before_those_that_finished_later(world: World) -> None:
    world.play(2)
    lease = world.batch().lease
    world.play(2)
    world.buffer.release(world.trainer_incarnation, lease, "the loss was not finite")
    assert world.batch().groups == (0, 1)


def test_filtered_rewards_of_a_released_lease_count_in_the_next_one(tmp_path: Path) -> None:
    world = World(tmp_path, config(algorithm={"filter_zero_variance": True}))
    world.play(1, rewards=(1.0, 1.0))
    for _ in range(2):
        world.play(1, rewards=(1.0, 0.0))
    metrics = world.batch().metrics
    world.buffer.release(world.trainer_incarnation, 1, "the loss was not finite")
    assert world.batch().metrics == metrics
    assert metrics["generate/filtered_groups"] == 1


# -- training -----------------------------------------------------------------------------------------------------


def test_a_lease_is_given_again_until_it_is_committed_and_a_commit_counts_once(world: World) -> None:
    world.play(4)
    batch = world.batch()
    assert world.batch() is batch
    for _ in range(2):
        assert world.buffer.commit(world.trainer_incarnation, batch.lease, PolicyVersion(1, 1)) is None
    assert world.buffer.version == PolicyVersion(1, 1)
    assert world.batch().groups == (2, 3)


def test_a_mini_batch_that_was_formed_for_a_trainer_that_is_gone_is_not_given_out(world: World) -> None:
    world.play(2)
    job = world.job()
    world.trainer_incarnation = world.buffer.join("trainer", "trainer")
    assert refused(world.buffer.finish_lease(job, job.run())) is RefusalReason.FENCED
    assert world.batch().groups == (0, 1)


def test_groups_that_expired_while_a_mini_batch_was_formed_are_not_trained(world: World) -> None:
    world.play(2)
    job = world.job()
    world.buffer.end()
    assert waits(world.buffer.finish_lease(job, job.run())) is WaitReason.DRAINED


def test_a_commit_must_make_the_next_version(world: World) -> None:
    world.play(2)
    lease = world.batch().lease
    assert refused(world.buffer.commit(world.trainer_incarnation, lease, PolicyVersion(1, 2))) is RefusalReason.VERSION
    assert (
        refused(world.buffer.commit(world.trainer_incarnation, lease + 1, PolicyVersion(1, 1))) is RefusalReason.LEASE
    )


def test_tokens_beyond_the_bound_are_stale_and_the_ledger_closes(tmp_path: Path) -> None:
    world = World(tmp_path, config(buffer={"lookahead": 4, "max_staleness": 1}))
    slow = world.generator.claimed()
    for n in range(3):
        world.play(2, PolicyVersion(1, n))
        world.train()
    world.generator.finish(slow, START)
    world.generator.finish(world.generator.claimed(PolicyVersion(1, 3)), PolicyVersion(1, 3))
    world.train()
    status = world.buffer.status()
    assert status.tokens["stale"] == 8
    assert status.tokens["stepped"] == 7 * 8
    world.buffer.covered(4)
    assert world.buffer.status().tokens["trained"] == 7 * 8
    assert world.buffer.status().ended == {"trained": 8}
    assert consistent(world)


def test_after_going_back_a_group_that_starts_anew_waits_for_the_step_that_it_was_admitted_with(tmp_path: Path) -> None:
    """Else its tokens would be older than the lookahead allows, and with lookahead 0 no longer on-policy."""
    world = World(tmp_path, config(buffer={"lookahead": 0}, trainer={"checkpoint_every": 1}))
    for n in range(2):
        world.play(2, PolicyVersion(1, n))
        world.train()
    world.buffer.covered(1)
    under_way = world.generator.claimed(PolicyVersion(1, 2))
    world.trainer_incarnation = world.buffer.join("trainer", "trainer", step=1)
    world.generator = Generator(world.buffer)  # as after the death of the whole run
    waiting = world.generator.claim(PolicyVersion(2, 1))
    assert isinstance(waiting, Wait) and waiting.reason is WaitReason.LOOKAHEAD
    assert world.train().groups == (2, 3), "which are given out again"
    again = world.generator.claimed(PolicyVersion(2, 2))
    assert again.group_id == under_way.group_id
    world.generator.finish(again, PolicyVersion(2, 2))
    world.generator.finish(world.generator.claimed(PolicyVersion(2, 2)), PolicyVersion(2, 2))
    world.train()
    assert consistent(world)


def test_strict_order_holds_after_going_back(tmp_path: Path) -> None:
    world = World(tmp_path, config(buffer={"order": "strict"}, trainer={"checkpoint_every": 1}))
    world.play(4)
    for _ in range(2):
        world.train()
    world.play(2, PolicyVersion(1, 2))
    world.trainer_incarnation = world.buffer.join("trainer", "trainer", step=0)
    assert [world.train().groups for _ in range(3)] == [(0, 1), (2, 3), (4, 5)]


def test_going_back_without_checkpoints_is_impossible_and_says_so(world: World) -> None:
    world.play(2)
    world.train()
    with pytest.raises(RunFailed, match=r"set trainer\.checkpoint_every"):
        world.buffer.join("trainer", "trainer", step=0)


# -- the end ------------------------------------------------------------------------------------------------------


def test_what_is_open_at_the_end_expires_as_run_end(world: World) -> None:
    works = [world.generator.claimed() for _ in range(4)]
    for work in works[:3]:
        world.generator.finish(work)
    world.generator.send([step(TrajectoryId(3, 0), works[3].prompt_uid, 0)])
    world.train()
    world.buffer.drain("max_steps")
    assert waits(world.generator.claim()) is WaitReason.DRAINED
    world.buffer.end()
    status = world.buffer.status()
    assert status.ended == {"expired/run_end": 2}
    assert status.tokens["expired"] == 8 + 2
    assert consistent(world)


def test_a_drained_trainer_is_told_when_no_mini_batch_can_come_any_more(world: World) -> None:
    works = [world.generator.claimed() for _ in range(3)]
    world.buffer.drain("stopped")
    assert waits(world.buffer.lease(world.trainer_incarnation)) is WaitReason.GROUPS
    for work in works[:2]:
        world.generator.finish(work)
    world.train()
    assert waits(world.buffer.lease(world.trainer_incarnation)) is WaitReason.DRAINED


def test_a_wait_names_its_reason_and_keeps_its_beginning(world: World) -> None:
    world.generator.claimed()
    first = world.buffer.lease(world.trainer_incarnation)
    world.clock.now += 6
    again = world.buffer.lease(world.trainer_incarnation)
    assert isinstance(first, Wait) and isinstance(again, Wait) and again.since == first.since
    assert "0 of 2 groups are complete" in again.detail
    assert "silent for 6 s" in again.detail
    who = {wait.who: wait.reason for wait in world.buffer.status().waits}
    assert who == {"trainer": "groups", "group=0/sample=0": "silent"}


def test_a_group_without_a_finite_advantage_is_refused_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nan_beyond_five(returns_G: Float64s, group_G: Int64s) -> Float64s:
        return np.where(returns_G > 5, np.nan, returns_G)

    monkeypatch.setitem(ESTIMATORS, "nan_beyond_five", nan_beyond_five)
    world = World(tmp_path, config(algorithm={"estimator": "nan_beyond_five"}))
    for rewards in ((1.0, 0.0), (9.0, 0.0), (0.0, 1.0)):
        world.generator.finish(world.generator.claimed(), rewards=rewards)
    batch = world.buffer.lease(world.trainer_incarnation)
    assert isinstance(batch, MiniBatch) and batch.groups == (0, 2)
    for buffer in (world.buffer, world.crash()):
        assert buffer.status().ended == {"refused/advantage": 1}
    assert consistent(world)
