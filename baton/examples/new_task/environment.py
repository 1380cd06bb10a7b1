"""An environment of your own: guess a number from 1 to 15, in at most four guesses.

    user: guess my number                assistant: 8
    user: higher                         assistant: 12
    user: lower                          assistant: 10        reward 1, done

An environment gets text and returns text; one object plays one episode. `reset` returns the prompt, `step` answers one
turn of the policy, `close` frees the episode's resources. If an episode raises or hangs, only its own trajectory is
lost.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from baton import Message, StepResult, Task

LARGEST = 15
GUESSES = 4
PROMPT = "guess my number"


class GuessNumber:
    """The environment: answers a guess with `higher` or `lower`; the right number has reward 1 and ends the episode."""

    def check_task(self, task: Task) -> None:
        """Raises if a row cannot be played. It is called for every row before a run starts. This method is optional."""
        number = int(task.reward_spec["ground_truth"])
        if not 1 <= number <= LARGEST:
            raise ValueError(f"ground_truth {number} is not between 1 and {LARGEST}")

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Begin an episode. Take all randomness from `seed`: all trajectories of a group have the same seed."""
        self.number = int(task.reward_spec["ground_truth"])
        self.guesses = 0
        return task.prompt

    async def step(self, text: str) -> StepResult:
        """Judge the last number in the text. A text without a number counts as a guess that is too low."""
        found = re.findall(r"\d+", text)
        guess = int(found[-1]) if found else 0
        self.guesses += 1
        done = guess == self.number or self.guesses == GUESSES
        info = {"guesses": 1}  # metrics; each is summed over the episode
        return StepResult([user(hint(guess, self.number))], float(guess == self.number), done, info)

    async def close(self) -> None:
        """Do nothing: the episode holds no resources."""


def hint(guess: int, number: int) -> str:
    """The hint after a wrong guess."""
    return "higher" if guess < number else "lower"


def user(text: str) -> Message:
    """A message that the policy reads."""
    return {"role": "user", "content": text}


# The rest is for the small model that `config.yaml` makes and trains on a CPU. With a model of your own (`model.path`)
# you need neither of the two functions.


def vocabulary() -> tuple[str, ...]:
    """Every word of the task, for a tokenizer made for it."""
    return (*PROMPT.split(), "higher", "lower", *(str(number) for number in range(1, LARGEST + 1)))


def demonstrations(n: int, right_fraction: float, rng: np.random.Generator) -> list[list[Message]]:
    """`n` conversations for the supervised start. About `right_fraction` of them halve the range with each guess.

    The others guess at random and ignore the hints, so that RL has something to improve.
    """
    return [_conversation(bool(rng.random() < right_fraction), rng) for _ in range(n)]


def _conversation(right: bool, rng: np.random.Generator) -> list[Message]:
    number, low, high = int(rng.integers(1, LARGEST + 1)), 1, LARGEST
    messages = [user(PROMPT)]
    for _ in range(GUESSES):
        guess = (low + high) // 2 if right else int(rng.integers(1, LARGEST + 1))
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            break
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        messages.append(user(hint(guess, number)))
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]
