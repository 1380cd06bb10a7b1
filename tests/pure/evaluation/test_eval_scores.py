"""Evaluation: means per trajectory, pass@k, lost trajectories."""

from itertools import combinations

import pytest

from service.evaluation.scores import EvalShard, EvalTrajectory, Evaluation, pass_at, summarize, table


def test_pass_at_k_is_the_share_of_k_draws_with_a_pass() -> None:
    outcomes = [True, False, False, True, False]
    for k in range(1, 6):
        draws = list(combinations(outcomes, k))
        assert pass_at(k, 5, 2) == pytest.approx(sum(map(any, draws)) / len(draws))


def played(uid: str, reward: float, stop_reason: str = "stop", n_turns: int = 2) -> EvalTrajectory:
    return EvalTrajectory(uid, reward, n_turns, 8, stop_reason)


def passes(found: Evaluation) -> dict[int, float]:
    return {int(name[8:]): chance for name, chance in found.scores.items() if name.startswith("pass_at_")}


def test_means_are_per_trajectory_and_passes_per_prompt() -> None:
    found = summarize("dev", [played("a", r) for r in (1, 0, 0, 1)] + [played("b", 0.0, n_turns=4) for _ in range(4)])
    assert (found.scores["avg_score"], found.scores["avg_turns"], found.n_prompts, found.n_trajectories) == (
        0.25,
        3.0,
        2,
        8,
    )
    assert passes(found) == {1: 0.25, 2: pytest.approx(5 / 12), 4: 0.5}
    assert found.metrics()["eval/dev/pass_at_4"] == 0.5


def test_lost_trajectories_are_counted_and_left_out_of_the_means() -> None:
    lost = [played("a", 0.0, "environment_error"), played("b", 0.0, "engine_timeout")]
    found = summarize("dev", [played("a", 1.0), played("a", 1.0, "max_turns"), *lost])
    assert (found.scores["avg_score"], found.n_lost, found.n_prompts) == (1.0, 2, 2)
    assert passes(found) == {1: 1.0, 2: 1.0}
    assert found.stop_reasons == {"stop": 1, "max_turns": 1, "environment_error": 1, "engine_timeout": 1}
    cut = EvalTrajectory("a", 0.0, 3, 8, "truncated", n_truncated=2)
    lost = [EvalTrajectory("a", 0.0, 3, 8, "environment_error", n_truncated=3)]
    found = summarize("dev", [cut, played("a", 1.0, n_turns=5), *lost])
    assert found.metrics()["eval/dev/truncated_ratio"] == found.record()["truncated_ratio"] == 0.25
    assert "25.0%" in table([found])


def test_a_set_of_which_everything_was_lost_still_has_a_line() -> None:
    found = summarize("dev", [played("a", 0.0, "environment_error")])
    assert (found.scores["avg_score"], passes(found), found.n_lost) == (0.0, {}, 1)
    head, other, line = table([summarize("other", [played("a", 1.0)]), found]).splitlines()
    assert head.split() == ["set", "prompts", "trajectories", "score", "pass@1", "turns", "tokens", "cut", "lost"]
    assert other.split()[:5] == ["other", "1", "1", "1.000", "1.000"]
    assert line.split() == ["dev", "1", "1", "0.000", "-", "0.00", "0.0", "0.0%", "1"]


@pytest.mark.parametrize("most", [None, 7, 100])
def test_the_parts_of_a_set_are_its_rows_once_each_or_a_sample_of_them(most: int | None) -> None:
    rows = [row for number in range(3) for row in EvalShard(number, 3, most).rows(11)]
    assert len(set(rows)) == len(rows) == (7 if most == 7 else 11) and set(rows) <= set(range(11))


def test_a_sample_is_the_same_each_time_however_many_engines_play_it_and_is_not_the_beginning_of_the_set() -> None:
    alone = list(EvalShard(0, 1, 100).rows(10_000))
    assert sorted(row for number in range(3) for row in EvalShard(number, 3, 100).rows(10_000)) == alone
    assert 3_000 < sum(alone) / len(alone) < 7_000
