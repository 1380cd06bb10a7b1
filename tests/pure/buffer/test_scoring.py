"""Groups wait for their scorers between the last submit and the lease; the first answer is journalled and used."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.handoff.scoring import Answer
from service.handoff.steps import wire
from service.handoff.steps.values import MAX_REWARD
from service.handoff.verbs import Wait
from service.run.preparing.teachers import teachers_of
from service.types import MiniBatch, Refusal, RefusalReason
from tests.invariant import violations
from tests.pure.buffer.world import World, config

JUDGE = {"use": "mine:judge"}
TEACHER = {"use": "mine:Teacher", "kind": "teacher"}


def opened(folder: Path, scorers: dict[str, Any], **sections: Any) -> World:
    """A world with scorers; its groups are of two samples of two turns, of two sampled tokens each."""
    return World(folder, config(**sections).model_copy(update={"scorers": config(scorers=scorers).scorers}))


def played(world: World, groups: int = 2, rewards: tuple[float, ...] = (1.0, 0.0)) -> None:
    for _ in range(groups):
        world.generator.finish(world.generator.claimed(), rewards=rewards)


def waits(world: World) -> Wait:
    answer = world.buffer.lease(world.trainer_incarnation)
    assert isinstance(answer, Wait)
    return answer


def scored(world: World, scorer: str, *answers: tuple[float, ...]) -> None:
    for group_id, rewards in enumerate(answers):
        assert world.buffer.scoring.accept(group_id, scorer, Answer(rewards)) is None


def test_a_group_is_leased_with_the_rewards_of_its_judge_and_not_before(tmp_path: Path) -> None:
    world = opened(tmp_path, {"judge": JUDGE})
    played(world)
    assert "2 wait for a scorer (judge)" in waits(world).detail
    assert world.buffer.scoring.pending("judge") == [0, 1]
    scored(world, "judge", (0.25, 0.75))
    assert "1 wait for a scorer" in waits(world).detail
    scored(world, "judge", (0.25, 0.75), (0.5, 0.0))
    assert world.train().return_G.tolist() == [0.25, 0.75, 0.5, 0.0]
    assert violations(world.buffer.ledger) == [] and world.closes()


@pytest.mark.parametrize("returns", ["last", "sum"])
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {"combine": "add", "weight": 2.0}, [0.25 + 2.0, 0.5 + 4.0]),
        ({"combine": "add"}, {"combine": "add"}, [1 + 0.25 + 1.0, 0 + 0.5 + 2.0]),
    ],
)
def test_rewards_replace_the_environments_or_join_them(
    tmp_path: Path, returns: str, first: dict[str, Any], second: dict[str, Any], expected: list[float]
) -> None:
    scorers = {"a": JUDGE | first, "b": JUDGE | second}
    world = opened(tmp_path, scorers, algorithm={"returns": returns}, trainer={"mini_batch_size": 1})
    played(world, 1)
    if returns == "sum":
        expected = expected if not first else [0.25 + 1.0, 0.5 + 2.0]  # the world's steps have no rewards of their own
    scored(world, "b", (1.0, 2.0))
    scored(world, "a", (0.25, 0.5))
    assert world.batch().return_G.tolist() == expected


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer((1.0,)), RefusalReason.LENGTH_MISMATCH),
        (Answer((1.0, 2.0, 3.0)), RefusalReason.LENGTH_MISMATCH),
        (Answer((1.0, float("nan"))), RefusalReason.REWARD),
        (Answer((1.0, float("-inf"))), RefusalReason.REWARD),
        (Answer((1.0, 1e300)), RefusalReason.REWARD),
        (Answer(), RefusalReason.LENGTH_MISMATCH),
        (Answer((1.0, 2.0), ("why",)), RefusalReason.LENGTH_MISMATCH),
    ],
)
def test_a_bad_answer_is_refused_with_a_reason_and_nothing_is_journalled(
    tmp_path: Path, answer: Answer, reason: RefusalReason
) -> None:
    world = opened(tmp_path, {"judge": JUDGE})
    played(world)
    revision = world.buffer.revision
    refused = world.buffer.scoring.accept(0, "judge", answer)
    assert isinstance(refused, Refusal) and refused.reason is reason and world.buffer.revision == revision


THREE = {"n_samples_per_prompt": 3}
ONE_GROUP: dict[str, Any] = {"trainer": {"mini_batch_size": 1}}
NO_REWARD = float("nan")


@pytest.mark.parametrize("bad", [NO_REWARD, float("inf"), 2 * MAX_REWARD, -1e300])
def test_a_bad_reward_costs_its_trajectory_only(tmp_path: Path, bad: float, caplog: pytest.LogCaptureFixture) -> None:
    world = opened(tmp_path, {"judge": JUDGE}, algorithm=THREE)
    played(world)
    assert world.buffer.scoring.accept(0, "judge", Answer((0.25, bad, 0.75), ("a", "b", "c"))) is None
    assert "scorer judge: group=0/sample=1: its reward is not a number from -1e+12 to 1e+12" in caplog.text
    assert world.buffer.scoring.accept(1, "judge", Answer((0.5, 0.0, 1.0))) is None
    status = world.buffer.status()
    assert status.given_up == {"scorer": 1} and status.tokens["expired"] == 4
    assert status.scorers["judge"].failures == {"reward": 1} and status.scorers["judge"].scored == 2
    assert violations(world.buffer.ledger) == []
    [said] = world.buffer.complete_group(0).scores
    assert (said.rewards, said.info) == ((0.25, 0.75), ("a", "c"))
    assert world.train().return_G.tolist() == [0.25, 0.75, 0.5, 0.0, 1.0]
    assert violations(world.buffer.ledger) == [] and world.closes()


@pytest.mark.parametrize("crashes", [False, True])
def test_rewards_that_add_up_to_more_than_the_bound_cost_their_trajectory_only(tmp_path: Path, crashes: bool) -> None:
    more = JUDGE | {"combine": "add"}
    world = opened(tmp_path, {"a": more, "b": more, "c": more}, algorithm={"n_samples_per_prompt": 4}, **ONE_GROUP)
    played(world, 1, rewards=(MAX_REWARD, 0.0, 1.0, 0.5))
    scored(world, "a", (-1.0, MAX_REWARD, 0.25, 0.5))
    if crashes:
        world.crash()
    scored(world, "b", (0.5, MAX_REWARD, 0.25, 0.5))
    scored(world, "c", (-MAX_REWARD, -MAX_REWARD, 0.25, 0.5))
    status = world.buffer.status()
    assert status.given_up == {"scorer": 1}
    assert [status.scorers[name].failures for name in "bc"] == [{"reward": 1}, {}]
    assert world.train().return_G.tolist() == [-0.5, 1.75, 2.0]
    assert violations(world.buffer.ledger) == [] and world.closes()


def test_each_scorer_answers_about_all_trajectories_and_any_of_them_can_cost_one(tmp_path: Path) -> None:
    world = opened(
        tmp_path,
        {"a": JUDGE, "b": JUDGE | {"combine": "add"}, "t": TEACHER},
        algorithm={"n_samples_per_prompt": 4, "teacher": {}},
        trainer={"mini_batch_size": 1},
    )
    played(world, 1)
    tokens = -np.arange(16, dtype=np.float32) / 16
    assert world.buffer.scoring.accept(0, "a", Answer((NO_REWARD, 0.0, 0.25, 0.5))) is None
    assert len(world.buffer.scoring.group(0)[1].ends) == 4
    world.crash()
    assert world.buffer.scoring.accept(0, "t", Answer(logprobs=tokens)) is None
    alone = world.buffer.scoring.accept(0, "b", Answer((0.0, NO_REWARD, NO_REWARD, 1.0)))
    assert isinstance(alone, Refusal) and alone.reason is RefusalReason.REWARD
    assert world.buffer.scoring.accept(0, "b", Answer((0.0, 1.0, NO_REWARD, 1.0))) is None
    assert world.buffer.status().given_up == {"scorer": 2} and violations(world.buffer.ledger) == []
    batch = world.batch()
    assert batch.return_G.tolist() == [1.0, 1.5]
    assert sorted(teacher_N(batch)) == [round(float(v), 3) for v in tokens[[15, 14, 13, 12, 7, 6, 5, 4]]]


def test_without_an_answer_only_the_groups_own_fate_is_refused(tmp_path: Path) -> None:
    world = opened(tmp_path, {"judge": JUDGE})
    played(world, 3)
    world.buffer.scoring.failed("judge", "deadline", "60 s")
    world.buffer.scoring.give_up(1, "judge", "deadline")
    scored(world, "judge", (0.25, 0.75))
    assert world.buffer.scoring.accept(2, "judge", Answer((0.0, 1.0))) is None
    status = world.buffer.status()
    assert status.ended == {"refused/scorer": 1} and status.tokens["refused"] == 8
    assert status.scorers["judge"].failures == {"deadline": 1} and status.scorers["judge"].refused == 1
    assert json.loads(json.dumps(status.as_dict()))["scorers"]["judge"]["failures"] == {"deadline": 1}
    assert world.train().groups == (0, 2) and world.closes()


def test_with_the_fallback_the_environments_rewards_count(tmp_path: Path) -> None:
    world = opened(tmp_path, {"judge": JUDGE | {"fallback": "environment_reward"}})
    played(world)
    world.buffer.scoring.give_up(0, "judge", "died")
    assert world.buffer.scoring.accept(1, "judge", Answer((0.5, 0.25), ("good", "x" * 99999))) is None
    assert world.batch().return_G.tolist() == [1.0, 0.0, 0.5, 0.25]
    [fell_back], [said] = (world.buffer.complete_group(group_id).scores for group_id in range(2))
    assert fell_back.fallback == "died" and fell_back.rewards is None
    assert said.info[0] == "good" and len(said.info[1]) < 4096


def test_filters_and_the_curriculum_count_the_scored_rewards(tmp_path: Path) -> None:
    world = opened(tmp_path, {"judge": JUDGE}, algorithm={"filter_zero_variance": True}, data={"curriculum": {}})
    played(world, 2)
    assert world.buffer.status().prompts["untried"] == world.n_prompts
    scored(world, "judge", (1.0, 1.0), (0.0, 0.5))
    status = world.buffer.status()
    assert status.ended == {"filtered/zero_variance": 1} and status.prompts["untried"] == world.n_prompts - 2


def test_a_scorer_that_was_removed_from_the_configuration_is_not_waited_for(tmp_path: Path) -> None:
    world = opened(tmp_path, {"judge": JUDGE})
    played(world)
    world.settings = world.settings.model_copy(update={"scorers": {}})
    world.crash()
    assert world.batch().return_G.tolist() == [1.0, 0.0, 1.0, 0.0]


def teacher_N(batch: MiniBatch) -> list[float]:
    [[micro]] = batch.ranks
    assert micro.teacher_logprobs_N is not None
    assert np.isnan(micro.teacher_logprobs_N[~micro.loss_mask_N]).all()
    return [round(float(value), 3) for value in micro.teacher_logprobs_N[micro.loss_mask_N]]


@pytest.mark.parametrize("merge", ["linear", "off"])
def test_a_teachers_log_probabilities_stand_at_their_tokens_however_steps_are_merged(
    tmp_path: Path, merge: str
) -> None:
    world = opened(
        tmp_path, {"t": TEACHER}, algorithm={"teacher": {}}, trainer={"mini_batch_size": 1}, buffer={"merge": merge}
    )
    played(world, 1)
    values = -np.arange(8, dtype=np.float32) / 8
    for wrong in (values[:7], np.append(values[:7], np.nan), values + 0.5):
        assert isinstance(world.buffer.scoring.accept(0, "t", Answer(logprobs=np.float32(wrong))), Refusal)
    assert world.buffer.scoring.accept(0, "t", Answer(logprobs=values)) is None
    world.crash()
    batch = world.batch()
    assert sorted(teacher_N(batch)) == sorted(values.round(3).tolist())
    [[micro]] = wire.decode_mini_batch(wire.encode_mini_batch(batch)).ranks
    assert micro.teacher_logprobs_N is not None and micro.teacher_logprobs_N.tobytes() == (
        batch.ranks[0][0].teacher_logprobs_N.tobytes()
    )


def test_rows_have_the_teachers_that_their_column_names(tmp_path: Path) -> None:
    settings = config(
        algorithm={"teacher": {"column": "who"}},
        scorers={"maths": TEACHER, "code": TEACHER, "judge": JUDGE},
    )
    rows: list[dict[str, Any]] = [{"who": "maths"}, {}, {"who": "code"}]
    teachers = teachers_of(settings.scorers, settings.algorithm.teacher, rows, [None, 0.5, 1.0])
    assert teachers == ["maths", "", "code"]
    with pytest.raises(Exception, match="row 0, column who: 'judge' is no teacher"):
        teachers_of(settings.scorers, settings.algorithm.teacher, [{"who": "judge"}], [None])
    with pytest.raises(Exception, match=r"row 0, column temperature: 0\.5"):
        teachers_of(settings.scorers, settings.algorithm.teacher, [{"who": "code"}], [0.5])
    with pytest.raises(Exception, match="no row of the dataset names a teacher in its column 'who'"):
        teachers_of(settings.scorers, settings.algorithm.teacher, [{}, {"whom": "code"}], [None, None])
