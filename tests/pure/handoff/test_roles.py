"""Rewards, groups and baselines by prompt and role."""

from dataclasses import replace

import numpy as np
import pytest

from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.batches.credit import Credit, ReturnRule, Rule, returns
from service.handoff.batches.estimators import GROUP_ESTIMATORS, TURN_ESTIMATORS, advantages
from service.handoff.ledger.events import Scored
from service.handoff.ledger.scores import CompleteGroup, with_scores
from service.handoff.ledger.state import VersionHistory
from service.handoff.steps.tables import Episodes, end_objects, step_group
from service.handoff.steps.values import MAX_REWARD, TRAINED, packed_roles
from service.handoff.steps.wire import decode, encode
from service.handoff.validate import refusal
from service.types import Refusal, RefusalReason, Step, StepGroup, TrajectoryEnd, TrajectoryId
from tests.pure.handoff.worlds import LIMITS, SENDER, complete_group, episode

NAMED = ("verifier", "critic")
TRAIN = (*TRAINED, "verifier")
LIMITS_OF_ROLES = replace(LIMITS, n_named_roles=len(NAMED))

# of each trajectory: its turns as (role, reward, reward that was given later)
GROUP = [
    [("main", 0.0, 1.0), ("verifier", 1.0, 0.0), ("main", 0.5, 0.0), ("verifier", 0.0, 0.25)],
    [("main", 0.0, 0.0), ("verifier", 0.0, 0.0)],
    [("main", 1.0, 0.0)],
]
Turns = list[tuple[str, float, float]]


def group_of(played: list[Turns], group_id: int = 0) -> CompleteGroup:
    rng, steps, ends = np.random.default_rng(group_id), list[Step](), list[TrajectoryEnd]()
    for sample, turns in enumerate(played):
        of = TrajectoryId(group_id, sample)
        made = [replace(step, versions=np.zeros_like(step.versions)) for step in episode(rng, len(turns), of, "p")]
        steps += [replace(step, reward=reward) for step, (_, reward, _) in zip(made, turns, strict=True)]
        final = [reward + later for role, reward, later in turns if role == "main"][-1]
        roles = packed_roles([role for role, _, _ in turns], NAMED)
        later = tuple(later for _, _, later in turns)
        ends.append(TrajectoryEnd(of, "p", len(turns), "stop", final, roles, b"said", later if any(later) else ()))
    return complete_group(steps, ends, rng)


def of_role(role: str) -> list[list[float]]:
    """The rewards of a role's turns in each trajectory in which it had one."""
    found = [[reward + later for of, reward, later in turns if of == role] for turns in GROUP]
    return [rewards for rewards in found if rewards]


@pytest.mark.parametrize("rule", ["last", "sum"])
def test_every_role_is_compared_with_the_same_role_of_the_other_trajectories(rule: ReturnRule) -> None:
    settings = BatchSettings(1, 256, Rule("rloo", rule, named=NAMED), train=TRAIN)
    batch = form_mini_batch(1, [group_of(GROUP)], VersionHistory(), settings)
    returned = {
        role: [sum(rewards) if rule == "sum" else rewards[-1] for rewards in of_role(role)]
        for role in ("main", "verifier")
    }
    main = advantages("rloo", returned["main"], ["p"] * 3).tolist()
    verifier = advantages("rloo", returned["verifier"], ["p"] * 2).tolist()
    expected = [main[0], verifier[0], main[0], verifier[0], main[1], verifier[1], main[2]]
    assert batch.turn_advantage_X is not None and batch.turn_advantage_X.tolist() == pytest.approx(expected)
    assert batch.return_G.tolist() == pytest.approx(returned["main"])
    assert batch.metrics["role/verifier/reward"] == pytest.approx(np.mean(returned["verifier"]))
    assert batch.metrics["role/verifier/turns"] == 1.5 and batch.metrics["role/main/turns"] == pytest.approx(4 / 3)
    assert not any(key.startswith("role/critic") for key in batch.metrics)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("credit", ["trajectory", "return_to_go"])
def test_a_role_that_spoke_in_one_trajectory_of_a_group_has_no_baseline_and_no_advantage(
    estimator: str, credit: Credit
) -> None:
    if credit != "trajectory" and estimator not in TURN_ESTIMATORS:
        pytest.skip("refused by the configuration")
    spoke_once = [[("main", 1.0, 0.0), ("verifier", 5.0, 0.0)], [("main", 0.0, 0.0)], [("main", 0.5, 0.0)]]
    settings = BatchSettings(2, 256, Rule(estimator, "sum", credit, named=NAMED), train=TRAIN)
    groups = [group_of(spoke_once), group_of(GROUP, 1)]
    found_X = form_mini_batch(1, groups, VersionHistory(), settings).turn_advantage_X
    assert found_X is not None and found_X[1] == 0.0
    assert found_X[0] != 0.0 and found_X[5] != 0.0


def test_rewards_given_later_travel_with_the_end_and_count_for_their_step() -> None:
    group = group_of(GROUP)
    message = decode(encode(StepGroup(SENDER, group.steps, group.ends)), LIMITS_OF_ROLES)
    assert isinstance(message, StepGroup) and refusal(message, LIMITS_OF_ROLES) is None
    assert end_objects(message.ends) == end_objects(group.ends)
    played = Episodes.of(message.steps, message.ends)
    columns = (played.steps.sample_K.tolist(), played.steps.index_K.tolist(), played.reward_K.tolist())
    found = {(sample, index): reward for sample, index, reward in zip(*columns, strict=True)}
    assert found == {(g, t): r + later for g, turns in enumerate(GROUP) for t, (_, r, later) in enumerate(turns)}
    assert returns(played, "sum").tolist() == [1.5, 0.0, 1.0]


@pytest.mark.parametrize(
    ("turns", "roles", "rewards", "reason"),
    [
        (1, b"\6", (), None),
        (1, b"\7", (), RefusalReason.MALFORMED),
        (1, b"", (float("nan"),), RefusalReason.REWARD),
        (1, b"\1", (2 * MAX_REWARD,), RefusalReason.REWARD),
        (2, b"", (1.0, 1.0), None),
        (2, b"", (1.0,), RefusalReason.LENGTH_MISMATCH),
    ],
)
def test_roles_and_rewards_that_cannot_be_are_refused(
    turns: int, roles: bytes, rewards: tuple[float, ...], reason: RefusalReason | None
) -> None:
    of = TrajectoryId(0, 0)
    made = episode(np.random.default_rng(0), turns, of, "p")
    sent = step_group(SENDER, made, [TrajectoryEnd(of, "p", len(made), "stop", 0.0, roles, b"", rewards)])
    found = refusal(sent, LIMITS_OF_ROLES)
    assert (found.reason if isinstance(found, Refusal) else None) == reason


def test_a_scorer_that_replaces_rewards_replaces_those_of_main_alone() -> None:
    group = group_of(GROUP)
    said = Scored(0, "judge", rewards=(0.25, 0.5, 0.75), replaces=True)
    steps, ends, _ = with_scores(group.steps, group.ends, (said,))
    played = Episodes.of(steps, ends)
    assert returns(played, "sum").tolist() == returns(played, "last").tolist() == [0.25, 0.5, 0.75]
    settings = BatchSettings(1, 256, Rule("rloo", "sum", named=NAMED), train=TRAIN)
    batch = form_mini_batch(1, [group._replace(steps=steps, ends=ends)], VersionHistory(), settings)
    assert batch.metrics["role/verifier/reward"] == pytest.approx(np.mean([sum(of) for of in of_role("verifier")]))
    assert [end.transcript for end in end_objects(ends)] == [b"said"] * 3
