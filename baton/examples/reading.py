"""An environment that shows the benefit of compaction: the policy reads a text that is longer than the context, page by
page, takes notes, and answers a question.

Every prompt has its own facts. Each page holds one fact, and the question is about one page:

    user: what is the age of fox ? page owl age 17        assistant: note none
    user: page fox age 4                                  assistant: note 4
    user: page fox speed 9                                assistant: note 4
    user: end                                             assistant: answer 4      reward 1, done

A note is the policy's own summary of the pages that it has read. With `compact: true`, the question, the newest note
and the next page replace the whole conversation before every page. So a prompt stays short even if there are many
pages, and the notes are trained with the answer's reward. Without `compact` the history grows until it exceeds the
context.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from baton import Message, StepResult, Task
from baton.examples.lookup import ATTRIBUTES, ENTITIES, VALUES

NOTE, ANSWER, NONE = "note", "answer", "none"
WORDS = ("what", "is", "the", "of", "?", "page", "end", NOTE, ANSWER, NONE)
FEWEST, MOST = 2, 7
"""Minimum and maximum number of pages of a text."""


class Text(NamedTuple):
    """The pages of one prompt, each (entity, attribute, value), and the index of the page that answers the question."""

    pages: tuple[tuple[str, str, str], ...]
    asked: int

    @property
    def question(self) -> str:
        """The question's text."""
        entity, attribute, _ = self.pages[self.asked]
        return f"what is the {attribute} of {entity} ?"

    @property
    def answer(self) -> str:
        """The right answer: the value on the page that the question asks for."""
        return self.pages[self.asked][2]

    def told(self, turn: int) -> str:
        """The user's message in a turn: the turn's page, or `end` after the last page. Turns count from 0."""
        return f"page {' '.join(self.pages[turn])}" if turn < len(self.pages) else "end"

    def note(self, turn: int) -> str:
        """The ideal note in a turn: the answer, if its page was shown already; otherwise `none`."""
        return f"{NOTE} {self.answer if turn >= self.asked else NONE}"


@lru_cache(maxsize=1024)
def text(seed: int) -> Text:
    """Draw the text that belongs to `seed`: pages with different facts, and a question about one of the facts."""
    rng = np.random.default_rng(seed)
    n_pages = int(rng.integers(FEWEST, MOST + 1))
    places = rng.choice(len(ENTITIES) * len(ATTRIBUTES), size=n_pages, replace=False).tolist()
    values = rng.integers(len(VALUES), size=n_pages).tolist()
    pages = tuple(
        (ENTITIES[place // len(ATTRIBUTES)], ATTRIBUTES[place % len(ATTRIBUTES)], VALUES[value])
        for place, value in zip(places, values, strict=True)
    )
    return Text(pages, int(rng.integers(n_pages)))


class Reading:
    """The environment: an object plays one episode. The row's `extra_info` holds the seed of the episode's text."""

    def __init__(self, compact: bool = True) -> None:
        self._compact = compact

    def check_task(self, task: Task) -> None:
        """Raises if the row has no seed."""
        int(task.extra_info["seed"])

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """The question and the first page."""
        self._text, self._turn = text(int(task.extra_info["seed"])), 0
        return task.prompt

    async def step(self, text: str) -> StepResult:
        """Show the next page, or score the answer."""
        if self._turn == len(self._text.pages):
            return StepResult((), float(text.split() == [ANSWER, self._text.answer]), True)
        self._turn += 1
        told = self._text.told(self._turn)
        if not self._compact:
            return StepResult((_user(told),), 0.0, False)
        return StepResult((), 0.0, False, history=[_user(f"{self._text.question} {text} {told}")])

    async def close(self) -> None:
        """Do nothing: the episode holds no resources."""


def _user(content: str) -> Message:
    return Message(role="user", content=content)


def vocabulary() -> tuple[str, ...]:
    """Every word of the task, for a word-level tokenizer."""
    return (*WORDS, *ENTITIES, *ATTRIBUTES, *VALUES)


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` dataset rows, each with its own text."""
    seeds = np.random.default_rng(seed).integers(1 << 62, size=n).tolist()
    return [
        {
            "uid": f"reading-{seed}-{i}",
            "prompt": [_user(f"{text(drawn).question} {text(drawn).told(0)}")],
            "env_class": "reading",
            "extra_info": {"seed": drawn},
        }
        for i, drawn in enumerate(seeds)
    ]


def demonstrations(n: int, right_fraction: float, rng: np.random.Generator) -> list[list[Message]]:
    """`n` conversations that end at a random turn. About half have compaction, so that one warm-started model suits
    both variants.

    About `right_fraction` of the notes and answers are right; the others are a random value, or `none`.
    """
    shown = []
    for _ in range(n):
        drawn = text(int(rng.integers(1 << 62)))
        turn = int(rng.integers(len(drawn.pages) + 1))
        compact = rng.random() < 0.5
        messages = [_user(f"{drawn.question} {drawn.told(0)}")] if not compact or turn == 0 else []
        if compact and turn:
            messages = [_user(f"{drawn.question} {drawn.note(turn - 1)} {drawn.told(turn)}")]
        for read in range(turn if not compact else 0):
            messages += [Message(role="assistant", content=drawn.note(read)), _user(drawn.told(read + 1))]
        right = drawn.note(turn) if turn < len(drawn.pages) else f"{ANSWER} {drawn.answer}"
        says = right if rng.random() < right_fraction else f"{right.split()[0]} {_any_value(rng)}"
        shown.append([*messages, Message(role="assistant", content=says)])
    return shown


def _any_value(rng: np.random.Generator) -> str:
    return (*VALUES, NONE)[int(rng.integers(len(VALUES) + 1))]
