"""Credit by turn: advantages as they are defined, and all the way into a mini-batch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from service.config.checks import problems
from service.config.learn import AlgorithmConfig
from service.config.tree import Config
from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.batches.credit import Rule, turn_advantages
from service.handoff.batches.filters import FilterSettings, filtered
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.prefixes.merge import Mode
from service.handoff.steps.tables import step_objects
from service.handoff.steps.wire import decode_mini_batch, encode_mini_batch
from service.types import MiniBatch, Step, TrajectoryEnd, TrajectoryId
from tests.pure.handoff.worlds import complete_group, end, episode, ids

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


@pytest.mark.parametrize(("reward", "uids"), [(np.inf, ["a"]), (1.0, [])])
def test_rewards_that_are_no_numbers_or_of_no_prompt_are_refused(reward: float, uids: list[str]) -> None:
    with pytest.raises(ValueError, match="reward"):
        turn_advantages([[reward]], uids)


# -- into the mini-batch -----------------------------------------------------------------------------------------------


def group_with(rewards: list[list[float]], group_id: int = 0) -> CompleteGroup:
    """Trajectories whose turns got these rewards; every second sample branches at its second turn."""
    rng, steps, ends = np.random.default_rng(group_id), list[Step](), list[TrajectoryEnd]()
    for sample, reward_T in enumerate(rewards):
        trajectory = TrajectoryId(group_id, sample)
        played = episode(rng, len(reward_T), trajectory, f"p{group_id}")
        played = [replace(one, versions=np.zeros_like(one.versions)) for one in played]
        if sample % 2 and len(played) > 1:
            played[1] = replace(played[1], prompt_ids=ids(7, 8, 9))
        steps += [replace(one, reward=reward) for one, reward in zip(played, reward_T, strict=True)]
        ends.append(end(trajectory, len(reward_T), 0.0, f"p{group_id}"))
    return complete_group(steps, ends, rng)


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
def test_every_loss_token_has_the_advantage_of_its_turn_in_whatever_row_it_lies(mode: Mode) -> None:
    rng = np.random.default_rng(3)
    rewards = [[float(r) for r in rng.integers(-2, 3, n)] for n in (3, 4, 0, 2, 5, 1, 3, 2)]
    groups = [group_with(rewards[:4], 5), group_with(rewards[4:], 2)]
    settings = BatchSettings(2, 256, Rule("rloo", "sum", "return_to_go", 0.9), mode)
    batch = form_mini_batch(1, groups, VersionHistory(), settings)
    again = decode_mini_batch(encode_mini_batch(batch))
    expected = turn_advantages(rewards, [0] * 4 + [1] * 4, "return_to_go", 0.9, "rloo")
    tokens = {
        (4 * p + one.trajectory.sample, float(logprob)): expected[4 * p + one.trajectory.sample][one.index]
        for p, of_prompt in enumerate(groups)
        for one in step_objects(of_prompt.steps)
        for logprob in (one.logprobs if one.logprobs is not None else [])
    }
    assert advantage_of_tokens(again) == pytest.approx(tokens, rel=1e-6)
    means = [float(np.mean(of)) if len(of) else 0.0 for of in expected]
    assert batch.advantage_G.tolist() == pytest.approx(means, rel=1e-6)


def test_zero_variance_means_that_no_turn_has_an_advantage() -> None:
    by_turn = FilterSettings(Rule("rloo", "sum", "return_to_go"), zero_variance=True)
    same_sum = group_with([[1.0, 0.0], [0.0, 1.0]])
    assert filtered(same_sum, replace(by_turn, rule=Rule("rloo", "sum"))) is not None
    assert filtered(same_sum, by_turn) is None
    ended = filtered(group_with([[1.0, 0.0], [1.0, 0.0]]), by_turn)
    assert ended is not None and ended.reason == "zero_variance"


# -- the configuration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "wrong"),
    [
        ({"returns": "sum", "estimator": "rloo"}, None),
        ({"returns": "last", "estimator": "rloo"}, "use returns=sum"),
        ({"returns": "sum", "estimator": "maxrl"}, "defined on whole returns only"),
        ({"returns": "sum", "estimator": "reinforce++_baseline"}, "defined on whole returns only"),
        ({"returns": "sum", "estimator": "mine:own"}, "defined on whole returns only"),
    ],
)
def test_credit_by_turn_is_refused_where_it_has_no_meaning(algorithm: dict[str, object], wrong: str | None) -> None:
    config = Config(algorithm=AlgorithmConfig.model_validate({**algorithm, "credit": "return_to_go"}))
    found = [problem for problem in problems(config) if problem.startswith("algorithm.credit:")]
    assert found == [] if wrong is None else wrong in found[0] and len(found) == 1
