"""Made questions over the corpus that comes with Baton, in words that a made tokenizer knows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from examples import data
from examples.search_r1 import TOPK, by_words, numbered
from service.rollout.environment import Message

TAGS = ("<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>")
ASKED = (
    "on",
    "which",
    "river",
    "is",
    "?",
    "through",
    "region",
    "flows",
    "the",
    "of",
    "what",
    "known",
    "for",
    "nothing",
)
TOLD = ("a", "town", ".", ":", "give", "or", *(str(i) for i in range(1, 11)))


class Question(NamedTuple):
    """A question, what to search for one after the other, and the answer."""

    text: str
    searches: tuple[str, ...]
    answer: str


def question(rng: np.random.Generator) -> Question:
    """One hop (the river of a town) or two (the region of that river)."""
    made = data.world()
    town = made.towns[int(rng.integers(len(made.towns)))]
    if rng.random() < 0.5:
        return Question(f"on which river is {town.name} ?", (town.name,), town.river)
    asked = f"through which region flows the river of {town.name} ?"
    return Question(asked, (town.name, f"river {town.river} flows through"), town.region)


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` questions as dataset rows."""
    rng = np.random.default_rng(seed)
    return [_row(question(rng), f"search_r1-{seed}-{i}") for i in range(n)]


def _row(asked: Question, uid: str) -> dict[str, Any]:
    return {
        "uid": uid,
        "data_source": "baton/towns",
        "prompt": [Message(role="user", content=asked.text)],
        "env_class": "search_r1",
        "reward_spec": {"method": "rule", "ground_truth": {"target": [asked.answer]}},
        "extra_info": {"hops": len(asked.searches)},
    }


def vocabulary() -> tuple[str, ...]:
    """Every word of the questions, the searches and the corpus."""
    return (*TAGS, *ASKED, *TOLD, *data.names())


def demonstrations(n: int, right_fraction: float, rng: np.random.Generator) -> list[list[Message]]:
    """`n` conversations, of which about `right_fraction` search and answer right; the others answer at random."""
    return [_demonstration(question(rng), rng.random() < right_fraction, rng) for _ in range(n)]


def _demonstration(asked: Question, right: bool, rng: np.random.Generator) -> list[Message]:
    messages = [Message(role="user", content=asked.text)]
    for search in asked.searches[: None if right else int(rng.integers(len(asked.searches) + 1))]:
        (found,) = by_words(data.CORPUS).search([search], TOPK)
        told = numbered([hit.passage.contents for hit in found])
        messages.append(Message(role="assistant", content=f"<search> {search} </search>"))
        messages.append(Message(role="user", content=f"<information> {told} </information>"))
    rivers = tuple(data.world().rivers)
    answer = asked.answer if right else rivers[int(rng.integers(len(rivers)))]
    return [*messages, Message(role="assistant", content=f"<answer> {answer} </answer>")]
