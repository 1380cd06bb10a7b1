"""Credit by turn: advantages as they are defined, and all the way into a mini-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.columns import concat
from service.config.checks import problems
from service.config.learn import AlgorithmConfig
from service.config.tree import Config
from service.errors import UserError
from service.handoff.batches.advantages import ESTIMATORS, TURN_ESTIMATORS, Credit, Rule, advantages, turn_advantages
from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.batches.filters import FilterSettings, filtered
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.versions import VersionHistory
from service.handoff.prefixes.merge import Mode
from service.handoff.prefixes.step_equality import same_step
from service.handoff.steps.builder import step_group, steps_table
from service.handoff.steps.reward import MAX_REWARD
from service.handoff.steps.tables import ends_table, step_objects
from service.handoff.steps.wire import decode, decode_mini_batch, encode, encode_mini_batch
from service.handoff.validate import refusal
from service.types import MiniBatch, Refusal, RefusalReason, Step, StepGroup, TrajectoryEnd, TrajectoryId
from tests.pure.handoff.worlds import LIMITS, SENDER, end, episode, ids, share_prefixes, step

SETTINGS = BatchSettings(ranks=1, token_budget=256)

BY_TURN: list[Credit] = ["return_to_go", "potential"]

REWARDS = [[1.0, 0.0, 2.0], [0.5], [0.0, 3.0], []]
UIDS = ["a", "a", "a", "a"]

turns = st.lists(st.integers(-4, 4).map(float), max_size=5)
groups = st.lists(turns, min_size=2, max_size=6)


def test_a_turn_counts_the_rewards_from_it_on_against_those_of_the_others_of_which_ended_ones_count_nothing() -> None:
    a, b, c, d = turn_advantages(REWARDS, UIDS, "return_to_go", gamma=0.5)
    # the values by turn: [1.5 1 2], [0.5], [1.5 3], []
    assert a.tolist() == pytest.approx([1.5 - 2 / 3, 1.0 - 1.0, 2.0])
    assert b.tolist() == pytest.approx([0.5 - 3 / 3])
    assert c.tolist() == pytest.approx([1.5 - 2 / 3, 3.0 - 1 / 3])
    assert d.tolist() == []


@given(groups, st.sampled_from(TURN_ESTIMATORS), st.data())
def test_with_one_turn_each_credit_is_that_of_the_trajectory(
    rewards: list[list[float]], estimator: str, data: st.DataObject
) -> None:
    single = [[sum(turns)] for turns in rewards]
    uids = [data.draw(st.sampled_from("ab")) for _ in single]
    expected = advantages(estimator, [turns[0] for turns in single], uids)
    for credit in ("trajectory", *BY_TURN):
        ours = turn_advantages(single, uids, credit, 0.9, estimator)  # type: ignore[arg-type]
        np.testing.assert_allclose(np.concatenate(ours), expected, rtol=1e-12, atol=1e-12)


@given(groups)
def test_dr_grpo_is_rloo_scaled_by_the_size_of_the_group(rewards: list[list[float]]) -> None:
    n = len(rewards)
    with_itself = turn_advantages(rewards, ["a"] * n, estimator="grpo_no_std")
    for ours, without in zip(with_itself, turn_advantages(rewards, ["a"] * n), strict=True):
        np.testing.assert_allclose(ours, without * (n - 1) / n, atol=1e-12)


def test_grpo_divides_every_turn_by_the_deviation_of_whole_returns() -> None:
    plain = turn_advantages(REWARDS, UIDS, estimator="grpo_no_std")
    deviation = np.std([sum(turns) for turns in REWARDS], ddof=1)
    for ours, distance in zip(turn_advantages(REWARDS, UIDS, estimator="grpo"), plain, strict=True):
        np.testing.assert_allclose(ours, distance / (deviation + 1e-6))


def test_grpo_gives_nothing_where_whole_returns_are_equal_up_to_rounding() -> None:
    rewards = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]]
    assert sum(rewards[0]) != sum(rewards[1])
    assert not np.concatenate(turn_advantages(rewards, ["a", "a"], estimator="grpo")).any()
    assert np.concatenate(turn_advantages(rewards, ["a", "a"])).any()


@given(groups, st.floats(0.3, 1.0), st.data())
def test_potential_is_the_return_to_go_of_rewards_that_are_shaped_by_the_scores(
    rewards: list[list[float]], gamma: float, data: st.DataObject
) -> None:
    scores = [[data.draw(st.sampled_from([np.nan, -1.0, 0.5, 2.0])) for _ in turns] for turns in rewards]
    shaped = []
    for reward_T, score_T in zip(rewards, scores, strict=True):
        phi = [0.0]
        for score in score_T:
            phi.append(phi[-1] if np.isnan(score) else score)
        phi[len(reward_T)] = 0.0  # after the end, whatever the environment says about it
        shaped.append([r + gamma * phi[t + 1] - phi[t] for t, r in enumerate(reward_T)])
    uids = ["a"] * len(rewards)
    expected = turn_advantages(shaped, uids, "return_to_go", gamma)
    for ours, theirs in zip(turn_advantages(rewards, uids, "potential", gamma, scores=scores), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)


@pytest.mark.parametrize("credit", BY_TURN)
@pytest.mark.parametrize("estimator", TURN_ESTIMATORS)
def test_equal_trajectories_have_advantages_of_exactly_zero(credit: Credit, estimator: str) -> None:
    ours = turn_advantages([[0.1, 0.7, 0.2]] * 7, ["a"] * 7, credit, 0.9, estimator)
    assert not np.concatenate(ours).any()


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - set(TURN_ESTIMATORS)))
def test_an_estimator_without_a_meaning_by_turn_is_refused_with_the_reason(estimator: str) -> None:
    with pytest.raises(UserError, match=r"use grpo, grpo_no_std, rloo"):
        turn_advantages([[1.0], [0.0]], ["a", "a"], estimator=estimator)
    assert np.concatenate(turn_advantages([[1.0], [0.0]], ["a", "a"], "trajectory", estimator=estimator)).shape == (2,)


@pytest.mark.parametrize(
    ("rewards", "scores", "uids"),
    [([[np.inf]], None, ["a"]), ([[1.0]], [[-np.inf]], ["a"]), ([[1.0]], [[1.0, 2.0]], ["a"]), ([[1.0]], None, [])],
)
def test_rewards_and_scores_that_are_no_numbers_or_of_other_turns_are_refused(
    rewards: list[list[float]], scores: list[list[float]] | None, uids: list[str]
) -> None:
    with pytest.raises(ValueError, match="reward"):
        turn_advantages(rewards, uids, scores=scores)


# -- into the mini-batch -----------------------------------------------------------------------------------------------


def group_with(rewards: list[list[float]], scores: list[list[float | None]], group_id: int = 0) -> CompleteGroup:
    """Trajectories whose turns got these rewards and scores; every second sample branches at its second turn."""
    rng, steps, ends = np.random.default_rng(group_id), list[Step](), list[TrajectoryEnd]()
    for sample, (reward_T, score_T) in enumerate(zip(rewards, scores, strict=True)):
        trajectory = TrajectoryId(group_id, sample)
        played = episode(rng, len(reward_T), trajectory, f"p{group_id}")
        played = [replace(one, versions=np.zeros_like(one.versions)) for one in played]
        if sample % 2 and len(played) > 1:
            played[1] = replace(played[1], prompt_ids=ids(7, 8, 9))
        steps += [
            replace(one, reward=reward, score=score)
            for one, reward, score in zip(played, reward_T, score_T, strict=True)
        ]
        ends.append(end(trajectory, len(reward_T), 0.0, f"p{group_id}"))
    order = rng.permutation(len(steps))
    return CompleteGroup(group_id, f"p{group_id}", steps_table([steps[k] for k in order]), ends_table(ends))


def advantage_of_tokens(batch: MiniBatch) -> dict[tuple[int, float], float]:
    """The advantage of every loss token, by its trajectory and its log-probability, which is its own."""
    assert batch.turn_advantage_X is not None
    found: dict[tuple[int, float], float] = {}
    for micro in (micro for rank in batch.ranks for micro in rank):
        owner_N = np.repeat(micro.trajectory_of_row_R, np.diff(micro.offsets_R))
        for n in np.flatnonzero(micro.loss_mask_N).tolist():
            assert micro.turn_N is not None
            key = (int(owner_N[n]), float(micro.logprobs_N[n]))
            assert key not in found
            found[key] = float(batch.turn_advantage_X[micro.turn_N[n]])
    return found


@pytest.mark.parametrize("mode", ["off", "linear", "tree"])
@pytest.mark.parametrize("credit", BY_TURN)
def test_every_loss_token_has_the_advantage_of_its_turn_in_whatever_row_it_lies(credit: Credit, mode: Mode) -> None:
    rng = np.random.default_rng(3)
    rewards = [[float(r) for r in rng.integers(-2, 3, n)] for n in (3, 4, 0, 2, 5, 1, 3, 2)]
    scores = [[None if rng.random() < 0.5 else float(rng.normal()) for _ in turns] for turns in rewards]
    groups = [group_with(rewards[:4], scores[:4], 5), group_with(rewards[4:], scores[4:], 2)]
    settings = BatchSettings(2, 256, "rloo", "sum", credit, 0.9, mode)
    batch = form_mini_batch(1, groups, VersionHistory(), settings)
    again = decode_mini_batch(encode_mini_batch(batch))
    expected = turn_advantages(
        rewards, [0] * 4 + [1] * 4, credit, 0.9, "rloo", [[np.nan if s is None else s for s in of] for of in scores]
    )
    tokens = {
        (4 * p + one.trajectory.sample, float(logprob)): expected[4 * p + one.trajectory.sample][one.index]
        for p, of_prompt in enumerate(groups)
        for one in step_objects(of_prompt.steps)
        for logprob in (one.logprobs if one.logprobs is not None else [])
    }
    assert advantage_of_tokens(again) == pytest.approx(tokens, rel=1e-6)
    assert batch.metrics["reward/scored_turns"] == pytest.approx(
        sum(s is not None for of in scores for s in of) / sum(map(len, scores))
    )
    means = [float(np.mean(of)) if len(of) else 0.0 for of in expected]
    assert batch.advantage_G.tolist() == pytest.approx(means, rel=1e-6)


def test_without_credit_by_turn_no_turn_crosses_the_wire() -> None:
    batch = form_mini_batch(1, [group_with([[1.0, 0.0], [0.0]], [[None] * 2, [None]])], VersionHistory(), SETTINGS)
    assert batch.turn_advantage_X is None
    assert all(micro.turn_N is None for rank in batch.ranks for micro in rank)


def test_zero_variance_means_that_no_turn_has_an_advantage() -> None:
    by_turn = FilterSettings(Rule("rloo", "sum", "return_to_go"), zero_variance=True)
    same_sum = group_with([[1.0, 0.0], [0.0, 1.0]], [[None] * 2] * 2)
    assert filtered(same_sum, replace(by_turn, rule=Rule("rloo", "sum"))) is not None
    assert filtered(same_sum, by_turn) is None
    ended = filtered(group_with([[1.0, 0.0], [1.0, 0.0]], [[None] * 2] * 2), by_turn)
    assert ended is not None and ended.reason == "zero_variance"


# -- scores of states on the way ---------------------------------------------------------------------------------------


def test_scores_arrive_as_they_were_sent_and_steps_without_one_stay_without() -> None:
    steps = [step(0, [1], [2]), replace(step(1, [1, 2], [3]), score=0.25), step(2, [1, 2, 3], [4])]
    message = decode(encode(step_group(SENDER, steps, [])), LIMITS)
    assert isinstance(message, StepGroup)
    assert [one.score for one in step_objects(message.steps)] == [None, 0.25, None]
    assert [one.score for one in step_objects(share_prefixes(message.steps))] == [None, 0.25, None]
    assert concat([steps_table(steps[:1]), message.steps]).score_K.tolist()[2] == 0.25  # type: ignore[union-attr]
    plain = step_group(SENDER, steps[:1], [])
    assert plain.steps.score_K is None and "score_K" not in str(encode(plain))


@pytest.mark.parametrize(
    ("one", "other", "same"), [(None, None, True), (0.5, 0.5, True), (0.5, None, False), (1, 2, False)]
)
def test_a_step_that_comes_again_has_the_same_score(one: float | None, other: float | None, same: bool) -> None:
    first, again, third = (replace(step(0, [1], [2]), score=score) for score in (one, other, 3.0))
    third = replace(third, index=1)
    assert same_step(steps_table([first, third]), 0, steps_table([again]), 0, lambda _: None) is same


@pytest.mark.parametrize("score", [np.inf, -np.inf, 2 * MAX_REWARD])
def test_a_score_that_is_no_number_is_refused(score: float) -> None:
    table = steps_table([replace(step(0, [1], [2]), score=0.5)])
    message = StepGroup(SENDER, replace(table, score_K=np.array([score])), ends_table([]))
    found = refusal(message, LIMITS)
    assert isinstance(found, Refusal) and (found.reason, found.path) == (RefusalReason.REWARD, "score_K[0]")


# -- the configuration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "wrong"),
    [
        ({"returns": "sum", "estimator": "rloo"}, None),
        ({"returns": "last", "estimator": "rloo"}, "use returns=sum"),
        ({"returns": "sum", "estimator": "maxrl"}, "divides by the mean return"),
        ({"returns": "sum", "estimator": "reinforce++_baseline"}, "whitens over the mini-batch"),
        ({"returns": "sum", "estimator": "reinforce++", "step_wise": False}, "discounts along the tokens"),
        ({"returns": "sum", "estimator": "mine:own"}, "defined on whole returns only"),
    ],
)
@pytest.mark.parametrize("credit", BY_TURN)
def test_credit_by_turn_is_refused_where_it_has_no_meaning(
    algorithm: dict[str, object], wrong: str | None, credit: Credit
) -> None:
    config = Config(algorithm=AlgorithmConfig.model_validate({**algorithm, "credit": credit}))
    found = [problem for problem in problems(config) if problem.startswith("algorithm.credit:")]
    assert found == [] if wrong is None else wrong in found[0] and len(found) == 1


@pytest.mark.parametrize(
    "wrong", [{"credit": "return-to-go"}, {"gamma": float("nan")}, {"gamma": 1.5}, {"gamma": -0.1}]
)
def test_a_credit_or_a_discount_that_is_none_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}="):
        turn_advantages([[1.0, 2.0], [3.0]], ["a", "a"], **wrong)
