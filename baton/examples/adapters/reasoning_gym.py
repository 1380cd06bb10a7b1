"""Procedural tasks of reasoning-gym (the extra `reasoning-gym`): one question, partial credit.

    env.name: reasoning_gym
    env.options: {dataset: chain_sum, min_terms: 2, max_terms: 3}

A row's `extra_info` has the dataset's seed and size, and the question's index; `rows` makes such rows. The answer is
the text in the tag `<answer>`, or the whole response if it has no such tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import reasoning_gym

from baton import Message, StepResult, Task, tagged
from baton.examples.adapters.own_thread import OwnThread

Option = str | int | float | bool


class ReasoningGym:
    """An episode that asks one question of the dataset `dataset`. `options`: the dataset's options."""

    def __init__(self, dataset: str, **options: Option) -> None:
        self._name, self._options = dataset, tuple(sorted(options.items()))
        made(dataset, 0, 1, self._options)  # refuses an unknown name or option at the start
        self._dataset: Any = None
        self._entry: Any = None
        self._thread = OwnThread()

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Generate the row's question again, check that it equals the row's text, and return the prompt."""
        extra = task.extra_info
        self._dataset = made(self._name, int(extra["seed"]), int(extra["size"]), self._options)
        self._entry = await self._thread.call(self._dataset.__getitem__, int(extra["index"]))
        if not any(self._entry["question"] in message["content"] for message in task.prompt):
            raise ValueError("the dataset makes another question than the row's; its version or options differ")
        return task.prompt

    async def step(self, text: str) -> StepResult:
        """Score the answer with the dataset's own function; the reward is between 0 and 1."""
        found = tagged(text, "answer")
        answer = (found[-1][1] if found else text).strip()
        score = float(await self._thread.call(self._dataset.score_answer, answer, self._entry))
        return StepResult((), score, True, {"solved": float(score == 1.0)})

    async def close(self) -> None:
        """End the thread."""
        self._thread.end()


def rows(n: int, seed: int, dataset: str = "chain_sum", **options: Option) -> list[dict[str, Any]]:
    """Make `n` questions as dataset rows. The environment that plays them needs the same dataset and options."""
    questions = made(dataset, seed, n, tuple(sorted(options.items())))
    return [
        {
            "uid": f"{dataset}-{seed}-{index}",
            "prompt": [Message(role="user", content=questions[index]["question"])],
            "extra_info": {"seed": seed, "size": n, "index": index},
        }
        for index in range(n)
    ]


@lru_cache(maxsize=64)
def made(name: str, seed: int, size: int, options: tuple[tuple[str, Option], ...]) -> Any:
    """The dataset `name` of reasoning-gym."""
    return reasoning_gym.create_dataset(name, seed=seed, size=size, **dict(options))
