"""The game of `make real`, and the program that prepares its model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from baton import Task, load_tasks
from baton.examples.guess_number import LARGEST, GuessNumber, rows
from scripts import real_model
from service.rollout.prompts.dataset import write_rows


async def play(number: int, *texts: str) -> list[tuple[str, float, bool]]:
    """The environment's answers to some texts: message, reward, whether the game is over."""
    game = GuessNumber()
    await game.reset(Task("a", (), "guess_number", {"ground_truth": number}), 0)
    results = [await game.step(text) for text in texts]
    return [(result.messages[0]["content"], result.reward, result.done) for result in results]


async def test_hints_leave_the_numbers_that_are_possible_and_lead_to_the_right_one() -> None:
    first, second, third, fourth = await play(10, "8", "13", "what?", "it is 10!")
    assert (first[0], second[0], third[0]) == ("higher: 9 to 15?", "lower: 9 to 12?", "higher: 9 to 12?")
    assert [done for _, _, done in (first, second, third)] == [False] * 3 and fourth[1:] == (1.0, True)


@pytest.mark.parametrize("number", range(1, LARGEST + 1))
async def test_who_halves_what_is_left_wins_and_who_repeats_a_guess_loses(number: int) -> None:
    low, high, texts = 1, LARGEST, list[str]()
    while not texts or int(texts[-1]) != number:
        texts.append(str((low + high) // 2))
        low, high = (int(texts[-1]) + 1, high) if int(texts[-1]) < number else (low, int(texts[-1]) - 1)
    assert (await play(number, *texts))[-1][1:] == (1.0, True)
    assert (await play(number, *["0"] * 4))[-1][1:] == (0.0, True)


def test_rows_ask_for_all_numbers_equally_often_and_a_row_of_another_game_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", rows(2 * LARGEST, 3))
    tasks = load_tasks(tmp_path / "a.jsonl")
    assert Counter(task.reward_spec["ground_truth"] for task in tasks) == dict.fromkeys(range(1, LARGEST + 1), 2)
    for task in tasks:
        GuessNumber().check_task(task)
    with pytest.raises(ValueError, match="not between 1 and 15"):
        GuessNumber().check_task(Task("b", (), "guess_number", {"ground_truth": 16}))


def test_without_hub_and_index_the_model_is_refused_with_the_command_that_gets_it(tmp_path: Path) -> None:
    call = f"import sys; sys.path[:0] = [{str(Path(real_model.__file__).parent)!r}]; import real_model as it; "
    call += f"it.FOLDER = it.Path({str(tmp_path / 'model')!r}); sys.exit(it.main())"
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_RETRIES": "0"}
    environment = {**os.environ, **nowhere}
    said = subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True, text=True, timeout=120)
    assert said.returncode == 2 and f"run `hf download {real_model.MODEL} --local-dir model` and" in said.stderr
    assert not (tmp_path / "model").exists()
