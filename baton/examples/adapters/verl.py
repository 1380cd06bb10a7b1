"""Reward functions with verl's signature, in an environment of one turn.

    env.compute_score: my_reward:compute_score

    def compute_score(data_source, solution_str, ground_truth, extra_info): ...    a number, or {"score": 1.0, ...}

Other numbers of a returned mapping become the trajectory's `info`. The function may be `async`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from baton import Message, StepResult, Task, UserError
from baton.examples.adapters.own_thread import OwnThread

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The names with which a function of verl is called."""


class ComputeScore:
    """One question and its answer, scored by `function`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise UserError(f"env.compute_score: {function!r} is no function")
        try:
            inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
        except ValueError:  # a function that does not tell its arguments
            pass
        except TypeError as error:
            raise UserError(
                f"env.compute_score: the function is called with {', '.join(ARGUMENTS)} by name: {error}"
            ) from error
        self._function = function
        self._thread = OwnThread()

    def check_task(self, task: Task) -> None:
        """Raises if the row has no `ground_truth`."""
        task.reward_spec["ground_truth"]

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """The row's prompt."""
        self.check_task(task)
        self._task = task
        return task.prompt

    async def step(self, text: str) -> StepResult:
        """Score the answer; the episode ends."""
        extra = dict(self._task.extra_info)
        truth, source = self._task.reward_spec["ground_truth"], extra.get("data_source", "")
        extra |= {"num_turns": 2, "rollout_reward_scores": {}}
        given = dict(zip(ARGUMENTS, (source, text, truth, extra), strict=True))
        called: Any = await self._thread.call(self._function, **given)
        result = await called if inspect.isawaitable(called) else called
        parts = dict(result) if isinstance(result, Mapping) else {"score": result}
        info = {name: float(part) for name, part in parts.items() if isinstance(part, Real | np.bool_)}
        return StepResult((), float(parts["score"]), True, info)

    async def close(self) -> None:
        """End the thread."""
        self._thread.end()
