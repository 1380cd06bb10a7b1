"""A solver and a verifier, both the policy: one looks facts up and answers, the other says whether that is right.

    main      user: what is the age of fox ?       assistant: look fox age        user: 17       assistant: answer 17
    verifier  user: what is the age of fox ? look fox age 17 answer 17            assistant: right

The verifier sees what the solver looked up, and what it answered. The solver's reward is 1 for the right answer, the
verifier's 1 for the right verdict: a solver that gets better makes the verifier's task another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from examples import lookup
from service.rollout.environment import Message, StepResult, Task

VERIFIER = "verifier"
RIGHT, WRONG = "right", "wrong"
MAX_ACTIONS = 4
"""Turns of the solver."""
VERIFIER_FRACTION, VERDICT_RIGHT_FRACTION = 0.5, 0.75
"""Fraction of the demonstrations that show verdicts, and fraction of those that are right."""


class SolverVerifier(lookup.Lookup):
    """One episode of the task."""

    def __init__(self) -> None:
        super().__init__()
        self._told: list[str] = []
        """The question, then what the solver did and read."""
        self._actions = 0
        self._solved: float | None = None
        """1 where the solver's answer is right; None before there is one."""

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """The row's prompt."""
        self._told = [message["content"] for message in task.prompt]
        return await super().reset(task, seed)

    async def step(self, text: str) -> StepResult:
        """Look up a fact or take the solver's answer; then score the verdict."""
        if self._solved is not None:
            says_right = text.split() == [RIGHT]
            knows = says_right == bool(self._solved) and text.split() in ([RIGHT], [WRONG])
            return StepResult((), float(knows), True, {f"verdict_on_{self._kind}": float(knows), self._kind: 1.0})
        result, self._actions = await super().step(text), self._actions + 1
        self._told.append(text)
        if result.done:
            self._solved = result.reward
            asked = Message(role="user", content=" ".join(self._told))
            return StepResult((asked,), result.reward, False, role=VERIFIER)
        self._told += [message["content"] for message in result.messages]
        return result._replace(done=self._actions == MAX_ACTIONS)

    @property
    def _kind(self) -> str:
        return RIGHT if self._solved else WRONG


def vocabulary() -> tuple[str, ...]:
    """Every word of the task."""
    return (*lookup.vocabulary(), RIGHT, WRONG)


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` dataset rows, each with its own facts."""
    return [row | {"env_class": "solver_verifier"} for row in lookup.rows(n, seed)]


def demonstrations(n: int, right_fraction: float, rng: np.random.Generator) -> list[list[Message]]:
    """Conversations of the solver, and of the verifier about as many right as wrong ones, with verdicts as noisy."""
    n_verdicts = round(n * VERIFIER_FRACTION)
    judged = [
        (solves, conversation)
        for solves in (True, False)
        for conversation in lookup.demonstrations(n_verdicts // 2, float(solves), rng)
    ]
    shown = lookup.demonstrations(n - len(judged), right_fraction, rng)
    for solves, conversation in judged:
        told = Message(role="user", content=" ".join(message["content"] for message in conversation))
        says_right = solves == (rng.random() < VERDICT_RIGHT_FRACTION)
        shown.append([told, Message(role="assistant", content=RIGHT if says_right else WRONG)])
    return [shown[place] for place in rng.permutation(len(shown))]
