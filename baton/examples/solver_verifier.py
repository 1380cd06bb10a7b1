"""A solver and a verifier, both played by the policy: the solver looks facts up and answers, the verifier checks the
answer.

    main      user: what is the age of fox ?     assistant: look fox age      user: 17      assistant: answer 12
    verifier  user: fox age 17 ? answer 12       assistant: wrong

The verifier reads the record that the question is about, and an answer. The solver has reward 1 for the right answer,
the verifier for the right verdict. The verifier is shown a right answer for half of the prompts, and a wrong answer for
the other half. If the solver's answer is not of this kind, the environment makes an answer. If only the solver's
answers were shown, a policy would first learn to always give the more frequent verdict, without reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from baton import Message, StepResult, Task
from baton.examples import lookup

VERIFIER = "verifier"
RIGHT, WRONG = "right", "wrong"
MAX_ACTIONS = 4
"""Maximum number of turns of the solver."""
VERIFIER_FRACTION, VERDICT_RIGHT_FRACTION = 0.5, 0.9
"""Fraction of the demonstrations that show verdicts, and fraction of the right verdicts among them."""


class SolverVerifier(lookup.Lookup):
    """The environment: an object plays one episode, first the solver's turns, then the verifier's turn."""

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """The row's prompt. The seed decides whether the verifier is shown a right answer."""
        self._actions, self._is_claimed, self._shows_right = 0, False, seed % 2 == 0
        return await super().reset(task, seed)

    async def step(self, text: str) -> StepResult:
        """In the solver's turns, look up a fact or score its answer; in the verifier's turn, score its verdict."""
        if self._is_claimed:
            kind = RIGHT if self._shows_right else WRONG
            knows = float(text.split() == [kind])
            return StepResult((), knows, True, {f"verdict_on_{kind}": knows, kind: 1.0})
        result, self._actions = await super().step(text), self._actions + 1
        if result.done:
            self._is_claimed = True
            shown = text if self._shows_right == bool(result.reward) else self._made(self._puzzle)
            return StepResult((claim(self._puzzle, shown),), result.reward, False, role=VERIFIER)
        return result._replace(done=self._actions == MAX_ACTIONS)

    def _made(self, asked: lookup.Puzzle) -> str:
        """An answer that the environment makes: a wrong answer if the solver's is right, otherwise the right answer."""
        if self._shows_right:
            return f"answer {asked.answer}"
        place = lookup.VALUES.index(asked.answer) + 1 + lookup.ENTITIES.index(asked.subject) % (len(lookup.VALUES) - 1)
        return f"answer {lookup.VALUES[place % len(lookup.VALUES)]}"


def claim(asked: lookup.Puzzle, answer: str) -> Message:
    """The message that the verifier reads: the record that the question is about, and an answer."""
    return Message(role="user", content=f"{asked.subject} {asked.attribute} {asked.answer} ? {answer}")


def vocabulary() -> tuple[str, ...]:
    """Every word of the task, for a word-level tokenizer."""
    return (*lookup.vocabulary(), RIGHT, WRONG)


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` dataset rows, each with its own facts."""
    return [row | {"env_class": "solver_verifier"} for row in lookup.rows(n, seed)]


def demonstrations(n: int, right_fraction: float, rng: np.random.Generator) -> list[list[Message]]:
    """`n` conversations of the solver or of the verifier. About half of the answers that the verifier is shown are
    right, and some of its verdicts are wrong."""
    n_verdicts = round(n * VERIFIER_FRACTION)
    shown = lookup.demonstrations(n - n_verdicts, right_fraction, rng)
    for _ in range(n_verdicts):
        asked, solves = lookup.puzzle(int(rng.integers(1 << 62))), bool(rng.random() < 0.5)
        others = [value for value in lookup.VALUES if value != asked.answer]
        answer = asked.answer if solves else others[int(rng.integers(len(others)))]
        says_right = solves == (rng.random() < VERDICT_RIGHT_FRACTION)
        verdict = Message(role="assistant", content=RIGHT if says_right else WRONG)
        shown.append([claim(asked, f"answer {answer}"), verdict])
    return [shown[place] for place in rng.permutation(len(shown))]
