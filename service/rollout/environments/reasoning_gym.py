"""The procedural tasks of reasoning-gym (the extra `reasoning-gym`): one question, one answer, partial credit.

    env.name: reasoning_gym/chain_sum     env.options: {min_terms: 2, max_terms: 3}

A row's `extra_info` holds the dataset's seed and size and the question's index; `rows` makes such rows. The answer is
the text in `<answer>`, or the whole text without the tag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from service.errors import UserError
from service.rollout.environment import Message, StepResult, Task, tagged
from service.rollout.environments.own_thread import OwnThread

Option = str | int | float | bool


class ReasoningGym:
    """One question of the dataset `name`; `options` configure it."""

    def __init__(self, name: str, **options: Option) -> None:
        _gym()
        self._name = name
        self._options = tuple(sorted(options.items()))
        _dataset(name, seed=0, size=1, options=self._options)  # refuses an unknown name or option at the start
        self._dataset: Any = None
        self._entry: Any = None
        self._thread = OwnThread()

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Make the question again and compare it with the row's."""
        extra = task.extra_info
        self._dataset = _dataset(self._name, int(extra["seed"]), int(extra["size"]), self._options)
        self._entry = await self._thread.call(self._dataset.__getitem__, int(extra["index"]))
        if not any(self._entry["question"] in message["content"] for message in task.prompt):
            raise ValueError("the dataset makes another question than the row's; its version or options differ")
        return task.prompt

    async def step(self, text: str) -> StepResult:
        """The dataset's score of the answer, between 0 and 1."""
        found = tagged(text, "answer")
        answer = (found[-1][1] if found else text).strip()
        score = float(await self._thread.call(self._dataset.score_answer, answer, self._entry))
        return StepResult((), score, True, {"solved": float(score == 1.0)})

    async def close(self) -> None:
        """End the thread."""
        self._thread.end()


class SyntheticRows:
    """Rows of one dataset for `data.make_rows`; the environment needs the same options."""

    def __init__(self, name: str, options: Mapping[str, Option]) -> None:
        self._name = name
        self._options = tuple(sorted(options.items()))

    def rows(self, n: int, seed: int) -> list[dict[str, Any]]:
        """`n` questions as dataset rows."""
        dataset = _dataset(self._name, seed, n, self._options)
        return [
            {
                "uid": f"{self._name}-{seed}-{index}",
                "data_source": f"reasoning_gym/{self._name}",
                "prompt": [Message(role="user", content=dataset[index]["question"])],
                "env_class": f"reasoning_gym/{self._name}",
                "extra_info": {"seed": seed, "size": n, "index": index},
            }
            for index in range(n)
        ]


@lru_cache(maxsize=64)
def _dataset(name: str, seed: int, size: int, options: tuple[tuple[str, Option], ...]) -> Any:
    try:
        return _gym().create_dataset(name, seed=seed, size=size, **dict(options))
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(f"env.name: reasoning-gym does not make {name!r} with {dict(options)}: {error}") from error


def _gym() -> Any:
    try:
        return import_module("reasoning_gym")
    except ImportError as error:
        raise UserError("env.name: reasoning_gym is not installed; install baton-rl[reasoning-gym]") from error
