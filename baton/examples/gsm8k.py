"""Word problems with a number as their answer, in one turn: `... #### 42`.

A row's `reward_spec` holds the `ground_truth`, as SkyRL's and verl's GSM8K files do. The synthetic rows are problems of
one or two sums in words of a small vocabulary:

    user: a farmer has 12 apples and buys 7 apples . how many apples are left ?
    assistant: 12 + 7 = 19 #### 19                         reward 1, done
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, NamedTuple

import numpy as np

from baton import Message, StepResult, Task

NUMBER = r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?"
MARKED = re.compile(rf"####\s*({NUMBER})")
ANY = re.compile(NUMBER)
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
PATTERNS = {"strict": MARKED, "flexible": ANY, "boxed": BOXED}


class Gsm8k:
    """The environment: an object plays one episode, with one problem. How the answer is read depends on `method`:
    `strict` reads the number after `####`; `flexible` reads the last number in the text; `boxed` reads the content of
    the last `\\boxed{}`, which need not be a number."""

    def __init__(self, method: Literal["strict", "flexible", "boxed"] = "strict") -> None:
        if method not in PATTERNS:
            raise TypeError(f"method is one of {', '.join(PATTERNS)}, not {method!r}")
        self._pattern = PATTERNS[method]

    def check_task(self, task: Task) -> None:
        """Raises if the row has no `ground_truth`, or the method needs a number and the `ground_truth` is no number."""
        truth = str(task.reward_spec["ground_truth"])
        if self._pattern is not BOXED and number(truth) is None:
            raise ValueError(f"ground_truth {truth!r:.80} is no number")

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """The row's prompt."""
        self.check_task(task)
        self._truth = str(task.reward_spec["ground_truth"])
        return task.prompt

    async def step(self, text: str) -> StepResult:
        """Read the answer from the text, and end the episode. The right answer has reward 1."""
        found = self._pattern.findall(text)
        return StepResult((), float(bool(found) and _equal(found[-1], self._truth)), True)

    async def close(self) -> None:
        """Do nothing: the episode holds no resources."""


def _equal(answer: str, truth: str) -> bool:
    """Whether two answers are the same number, or the same text apart from spaces."""
    as_numbers = number(answer), number(truth)
    if None not in as_numbers:
        return as_numbers[0] == as_numbers[1]
    return "".join(answer.split()) == "".join(truth.split())


def number(text: str) -> Decimal | None:
    """The number at the end of a text such as `$1,234.50` or `... #### 42`; None if there is none."""
    try:
        return Decimal(text.rpartition("####")[2].strip().replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


PEOPLE = ("farmer", "baker", "teacher", "sailor", "painter", "gardener")
THINGS = ("apples", "books", "boats", "loaves", "seeds", "stones")
GAINS = ("buys", "finds", "gets")
LOSSES = ("sells", "loses", "gives")
LARGEST = 30
WORDS = ("a", "has", "and", "then", ".", "how", "many", "are", "left", "?", "+", "-", "=", "####")


class SumProblem(NamedTuple):
    """A synthetic problem: its text, and the sums that solve it."""

    question: str
    sums: tuple[tuple[int, str, int, int], ...]

    @property
    def answer(self) -> int:
        """The result of the last sum."""
        return self.sums[-1][3]


def problem(rng: np.random.Generator) -> SumProblem:
    """Draw a problem of one or two sums; every number is between 0 and twice `LARGEST`."""
    person, thing = _one(PEOPLE, rng), _one(THINGS, rng)
    have = int(rng.integers(1, LARGEST))
    clauses = [f"a {person} has {have} {thing}"]
    sums = []
    for link in ("and", "then")[: int(rng.integers(1, 3))]:
        gain = have <= 1 or (have <= LARGEST and rng.random() < 0.5)
        change = int(rng.integers(1, LARGEST if gain else have))
        left = have + change if gain else have - change
        sums.append((have, "+" if gain else "-", change, left))
        clauses.append(f"{link} {_one(GAINS if gain else LOSSES, rng)} {change} {thing}")
        have = left
    return SumProblem(f"{' '.join(clauses)} . how many {thing} are left ?", tuple(sums))


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` synthetic problems as dataset rows."""
    rng = np.random.default_rng(seed)
    return [
        {
            "uid": f"gsm8k-{seed}-{i}",
            "data_source": "baton/sums",
            "prompt": [Message(role="user", content=drawn.question)],
            "env_class": "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": str(drawn.answer)},
            "extra_info": {"sums": len(drawn.sums)},
        }
        for i, drawn in enumerate(problem(rng) for _ in range(n))
    ]


def vocabulary() -> tuple[str, ...]:
    """Every word of the synthetic problems and their answers."""
    return (*WORDS, *PEOPLE, *THINGS, *GAINS, *LOSSES, *(str(i) for i in range(2 * LARGEST + 1)))


def demonstrations(n: int, right_fraction: float, rng: np.random.Generator) -> list[list[Message]]:
    """`n` worked problems. About `right_fraction` of them are right; the others have random results."""
    shown = []
    for _ in range(n):
        drawn = problem(rng)
        right = rng.random() < right_fraction
        results = [left if right else int(rng.integers(2 * LARGEST + 1)) for *_, left in drawn.sums]
        worked = [f"{a} {sign} {b} = {left}" for (a, sign, b, _), left in zip(drawn.sums, results, strict=True)]
        said = f"{' . '.join(worked)} #### {results[-1]}"
        shown.append([Message(role="user", content=drawn.question), Message(role="assistant", content=said)])
    return shown


def _one(words: Sequence[str], rng: np.random.Generator) -> str:
    return words[int(rng.integers(len(words)))]
