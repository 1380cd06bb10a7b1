"""Synthetic questions over the corpus in `examples.data`, in words of a small vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from examples import data
from examples.search_r1 import TOPK, by_words, numbered
from service.rollout.environment import Message

TAGS = ("<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>")
QUESTION_WORDS = (
    *("on", "which", "river", "is", "?", "through", "region"),
    *("flows", "the", "of", "what", "known", "for", "nothing"),
)
ANSWER_WORDS = ("a", "town", ".", ":", "give", "or", *(str(i) for i in range(1, 11)))


class SearchQuestion(NamedTuple):
    """A question, the searches that lead to the answer, and the answer."""

    text: str
    searches: tuple[str, ...]
    answer: str


def question(rng: np.random.Generator) -> SearchQuestion:
    """One hop (the river of a town) or two (the region of that river)."""
    drawn = data.geography()
    town = drawn.towns[int(rng.integers(len(drawn.towns)))]
    if rng.random() < 0.5:
        return SearchQuestion(f"on which river is {town.name} ?", (town.name,), town.river)
    asked = f"through which region flows the river of {town.name} ?"
    return SearchQuestion(asked, (town.name, f"river {town.river} flows through"), town.region)


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` questions as dataset rows."""
    rng = np.random.default_rng(seed)
    return [_row(question(rng), f"search_r1-{seed}-{i}") for i in range(n)]


def _row(asked: SearchQuestion, uid: str) -> dict[str, Any]:
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
    return (*TAGS, *QUESTION_WORDS, *ANSWER_WORDS, *data.names())


def demonstrations(n: int, right_fraction: float, rng: np.random.Generator) -> list[list[Message]]:
    """`n` conversations, of which about `right_fraction` search and answer right; the others answer at random."""
    return [_demonstration(question(rng), rng.random() < right_fraction, rng) for _ in range(n)]


def _demonstration(asked: SearchQuestion, right: bool, rng: np.random.Generator) -> list[Message]:
    messages = [Message(role="user", content=asked.text)]
    for search in asked.searches[: None if right else int(rng.integers(len(asked.searches) + 1))]:
        (hits,) = by_words(data.CORPUS).search([search], TOPK)
        passages = numbered([hit.passage.contents for hit in hits])
        messages.append(Message(role="assistant", content=f"<search> {search} </search>"))
        messages.append(Message(role="user", content=f"<information> {passages} </information>"))
    rivers = tuple(data.geography().rivers)
    answer = asked.answer if right else rivers[int(rng.integers(len(rivers)))]
    return [*messages, Message(role="assistant", content=f"<answer> {answer} </answer>")]
