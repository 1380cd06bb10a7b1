"""Word problems: reading the number, judging it, making problems."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from baton.examples import gsm8k
from baton.examples.gsm8k import Gsm8k
from service.rollout.environment import Task


async def reward(text: str, truth: str = "1234", method: str = "strict") -> float:
    episode = Gsm8k(method)  # type: ignore[arg-type]
    await episode.reset(Task("p", ({"role": "user", "content": "?"},), "gsm8k", {"ground_truth": truth}), 0)
    result = await episode.step(text)
    assert result.done
    return result.reward


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("600 + 634 = 1234 #### 1234", 1.0, 1.0),
        ("#### 1,234", 1.0, 1.0),
        ("#### $1234.00", 1.0, 1.0),
        ("#### 7 ... no: #### 1234", 1.0, 1.0),
        ("#### 1234 ... no: #### 7", 0.0, 0.0),
        ("the answer is 1234", 0.0, 1.0),
        ("1234 and then 5", 0.0, 0.0),
        ("#### -1234", 0.0, 0.0),
        ("#### 12345", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
async def test_the_number_that_counts_is_the_last_one_that_the_method_reads(
    text: str, strict: float, flexible: float
) -> None:
    assert await reward(text) == strict
    assert await reward(text, method="flexible") == flexible


async def test_the_truth_may_be_a_worked_solution_that_ends_in_its_number() -> None:
    assert await reward("#### 12", truth="5 + 7 = <<5+7=12>>12\n#### 12") == 1.0


async def test_a_row_whose_truth_is_no_number_is_an_error_of_its_own_episode() -> None:
    with pytest.raises(ValueError, match="ground_truth 'twelve' is no number"):
        await reward("#### 12", truth="twelve")


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(TypeError, match="one of strict, flexible, boxed"):
        Gsm8k("loose")  # type: ignore[arg-type]


def test_every_sum_of_a_made_problem_is_right_and_in_the_made_vocabulary() -> None:
    words = set(gsm8k.vocabulary())
    rng = np.random.default_rng(0)
    for _ in range(500):
        made = gsm8k.problem(rng)
        assert set(made.question.split()) <= words
        for a, sign, b, left in made.sums:
            assert left == (a + b if sign == "+" else a - b)
            assert {str(a), str(b), str(left)} <= words


def left(question: str) -> int:
    """The answer, worked out from the question's words."""
    words = question.split()
    total = int(words[3])
    for verb, change in itertools.pairwise(words):
        if verb in (*gsm8k.GAINS, *gsm8k.LOSSES):
            total += int(change) if verb in gsm8k.GAINS else -int(change)
    return total


async def test_made_rows_and_right_demonstrations_agree_with_the_words_of_the_question() -> None:
    for row in gsm8k.rows(50, seed=0):
        assert row["reward_spec"]["ground_truth"] == str(left(row["prompt"][0]["content"]))
    for question, answer in gsm8k.demonstrations(50, 1.0, np.random.default_rng(0)):
        assert await reward(answer["content"], str(left(question["content"]))) == 1.0
    wrong = gsm8k.demonstrations(50, 0.0, np.random.default_rng(0))
    assert sum([await reward(a["content"], str(left(q["content"]))) for q, a in wrong]) < 10
