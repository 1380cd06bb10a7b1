"""The environment alone, without a model: `python -m pytest`."""

import asyncio
from pathlib import Path

import pytest
from environment import GuessNumber

from baton import Message, Task, load_tasks

PROMPT: Message = {"role": "user", "content": "guess my number"}
TASK = Task("one", (PROMPT,), "environment:GuessNumber", {"ground_truth": 10})


def play(*texts: str) -> list[tuple[str, float, bool]]:
    """The environment's answers to texts: for each text (message, reward, whether the episode is over)."""

    async def episode() -> list[tuple[str, float, bool]]:
        environment = GuessNumber()
        assert await environment.reset(TASK, seed=0) == (PROMPT,)
        results = [await environment.step(text) for text in texts]
        await environment.close()
        return [(result.messages[0]["content"], result.reward, result.done) for result in results]

    return asyncio.run(episode())


def test_hints_lead_to_the_number() -> None:
    said = play("8", "is it 12 ?", "10")
    assert [hint for hint, _, _ in said[:2]] == ["higher", "lower"]
    assert said[-1][1:] == (1.0, True)


def test_four_wrong_guesses_end_the_episode_without_a_reward() -> None:
    assert [done for _, _, done in play(*["1"] * 4)] == [False] * 3 + [True]
    assert play(*["1"] * 4)[-1][1] == 0.0


def test_a_text_without_a_number_is_a_wrong_guess() -> None:
    assert play("I do not know") == [("higher", 0.0, False)]


def test_every_row_of_the_dataset_can_be_played() -> None:
    for task in load_tasks(Path(__file__).parent / "train.jsonl"):
        GuessNumber().check_task(task)
    with pytest.raises(ValueError, match="not between"):
        GuessNumber().check_task(Task("two", (PROMPT,), "environment:GuessNumber", {"ground_truth": 99}))
