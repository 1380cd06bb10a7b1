"""Guess a number from 1 to 15, in at most four guesses: a game in several turns for a pretrained model.

    system: Guess the number. Answer with one number only.        (then one game as an example)
    user: 1 to 15?                       assistant: 8
    user: higher: 9 to 15?               assistant: 13
    user: lower: 9 to 12?                assistant: 10        reward 1, done

A guess halves the remaining range, so four guesses are enough for every number. The prompt of each row is the same;
only the environment knows the number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from baton import Message, StepResult, Task

LARGEST = 15
GUESSES = 4
RULE = "Guess the number. Answer with one number only."
EXAMPLE = (f"1 to {LARGEST}?", "8", "lower: 1 to 7?", "4", f"right! 1 to {LARGEST}?")
"""A won game as alternating messages of user and assistant, and the beginning of the next game."""


class GuessNumber:
    """The environment: an object plays one game. It answers a guess with the remaining range. The right guess has
    reward 1 and ends the episode."""

    def check_task(self, task: Task) -> None:
        """Raises if the row's number is not between 1 and `LARGEST`."""
        number = int(task.reward_spec["ground_truth"])
        if not 1 <= number <= LARGEST:
            raise ValueError(f"ground_truth {number} is not between 1 and {LARGEST}")

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Begin a game; returns the row's prompt."""
        self._number = int(task.reward_spec["ground_truth"])
        self._low, self._high, self._guesses = 1, LARGEST, 0
        return task.prompt

    async def step(self, text: str) -> StepResult:
        """Judge the first number in the text. A text without a number is a wrong guess, and the range stays."""
        found = re.search(r"\d+", text)
        guess = int(found[0]) if found else 0
        self._guesses += 1
        possible = self._low <= guess <= self._high
        if found and guess < self._number:
            self._low = max(self._low, guess + 1)
        elif found and guess > self._number:
            self._high = min(self._high, guess - 1)
        word = "higher" if guess < self._number else "lower"
        won = guess == self._number
        hint = Message(role="user", content=f"{word}: {self._low} to {self._high}?")
        return StepResult((hint,), float(won), won or self._guesses == GUESSES, {"possible_guesses": float(possible)})

    async def close(self) -> None:
        """Do nothing: the episode holds no resources."""


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` games as dataset rows. Each number occurs equally often, as far as `n` allows."""
    rng = np.random.default_rng(seed)
    talk = [Message(role=("user", "assistant")[turn % 2], content=text) for turn, text in enumerate(EXAMPLE)]
    return [
        {
            "uid": f"guess-{seed}-{row}",
            "prompt": [Message(role="system", content=RULE), *talk],
            "env_class": "guess_number",
            "reward_spec": {"method": "rule", "ground_truth": int(number) + 1},
        }
        for row, number in enumerate(rng.permutation(n) % LARGEST)
    ]
