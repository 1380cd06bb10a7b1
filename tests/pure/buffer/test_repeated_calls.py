"""Ray repeats a call whose answer was lost: saying anything twice is saying it once."""

from dataclasses import replace
from pathlib import Path

import pytest

from service.handoff.ledger.state import CLAIMS_REMEMBERED, Member
from service.handoff.verbs import Assignment, Claim, Wait, WaitReason
from service.types import Refusal, RefusalReason, TrajectoryId
from tests.pure.buffer.world import START, World, step


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def claim(world: World, number: int) -> Assignment | Wait | Refusal:
    return world.buffer.claim(Claim(world.generator.name, world.generator.incarnation, START, number))


def claimed(world: World, number: int) -> Assignment:
    answer = claim(world, number)
    assert isinstance(answer, Assignment), answer
    return answer


def restart(world: World) -> None:
    """Everything that the generator holds is silent too long."""
    world.later(11)


def test_a_repeated_claim_gives_the_same_work_and_issues_nothing(world: World) -> None:
    first = claimed(world, 1)
    assert claimed(world, 1) == first
    assert claimed(world, 2).group_id == first.group_id + 1
    assert claimed(world, 1) == first
    assert world.buffer.status().issued == 2


def test_a_claim_of_several_groups_gives_what_is_admitted_and_again_the_same_when_repeated(world: World) -> None:
    asked = Claim(world.generator.name, world.generator.incarnation, START, 1)
    given = world.buffer.claim_several(asked, 100)
    assert isinstance(given, list) and [each.group_id for each in given] == list(range(len(given)))
    assert 1 < len(given) == world.buffer.status().issued < 100
    assert world.buffer.claim_several(asked, 100) == given
    assert isinstance(why := world.buffer.claim_several(asked._replace(request_id=101), 2), Wait)
    assert why.reason is WaitReason.LOOKAHEAD
    restart(world)  # the work of all these numbers goes on under others
    assert isinstance(why := world.buffer.claim_several(asked, 2), Wait) and why.reason is WaitReason.ANSWERED


@pytest.mark.parametrize("segment_bytes", [1 << 20, 1], ids=["from its event", "from a snapshot"])
def test_a_claim_repeated_after_a_crash_gives_the_same_work(tmp_path: Path, segment_bytes: int) -> None:
    world = World(tmp_path, segment_bytes=segment_bytes)
    first = claimed(world, 1)
    world.crash()
    assert claimed(world, 1) == first
    assert world.buffer.status().issued == 1


def test_a_repeated_claim_of_restarted_samples_gives_them_with_their_attempts_and_an_older_one_does_not(
    world: World,
) -> None:
    claimed(world, 1)
    restart(world)
    again = claimed(world, 2)
    assert again.attempts == (1, 1)
    assert claimed(world, 2) == again
    answer = claim(world, 1)
    assert isinstance(answer, Wait) and answer.reason is WaitReason.ANSWERED


def test_only_the_newest_claims_are_remembered() -> None:
    member = Member(incarnation=1)
    for number in range(1, 2 * CLAIMS_REMEMBERED + 1):
        member.note_given(number, number, {0: 0})
    assert sorted(member.given) == list(range(CLAIMS_REMEMBERED + 1, 2 * CLAIMS_REMEMBERED + 1))


def test_a_release_said_twice_is_one_and_one_of_a_committed_lease_is_refused(world: World) -> None:
    world.play(2)
    lease = world.batch().lease
    for _ in range(2):
        assert world.buffer.release(world.trainer_incarnation, lease, "the loss was not finite") is None
    trained = world.train().lease
    for unknown in (trained, 0, 99):
        answer = world.buffer.release(world.trainer_incarnation, unknown, "late")
        assert isinstance(answer, Refusal) and answer.reason is RefusalReason.LEASE


def test_a_refused_message_said_again_does_not_cost_the_new_attempt_its_life(world: World) -> None:
    work = claimed(world, 1)
    made = step(TrajectoryId(work.group_id, 0), work.prompt_uid, 0)
    bad = world.generator.message([replace(made, temperature=0.0)])
    for _ in range(2):
        assert isinstance(world.buffer.submit(bad), Refusal)
        again = claimed(world, 2)
        assert (again.samples, again.attempts) == ((0,), (1,))
    assert world.buffer.status().restarts == {"refused_temperature": 1}
