"""The built-in task: ask a store for facts, then answer. Search-R1 in small.

Every prompt has its own table of facts, so reading pays and memory does not:

    user: what is the age of the friend of fox ?      the store knows: fox friend -> owl, owl age -> 17, ...
    assistant: look fox friend                        user: owl
    assistant: look owl age                           user: 17
    assistant: answer 17                              reward 1, done

A third of the questions has two hops as here, the others one ("what is the age of fox ?"). Whatever is no action, or
asks for what the store does not hold, is told `none`. `answer` ends the episode, also at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from service.rollout.environment import Message, StepResult, Task

ENTITIES = (
    *("ant", "bat", "bear", "bee", "boar", "cat", "cow", "crab", "crow", "deer", "dog", "dove"),
    *("duck", "eel", "elk", "fox", "frog", "goat", "hare", "hawk", "hen", "ibis", "lynx", "owl"),
)
ATTRIBUTES = ("age", "weight", "height", "speed")
RELATION = "friend"
VALUES = tuple(str(value) for value in range(1, 25))
WORDS = ("what", "is", "the", "of", "?", "look", "answer", "none")
TWO_HOP_SHARE = 1 / 3
TOLD_SHARE = 0.55
"""Share of the demonstrations with a wrong lookup that answer what they were told."""


class World(NamedTuple):
    """The facts behind one prompt, and its question."""

    facts: dict[tuple[str, str], str]
    entity: str
    attribute: str
    hops: int

    @property
    def question(self) -> str:
        """The prompt's text."""
        subject = self.entity if self.hops == 1 else f"the {RELATION} of {self.entity}"
        return f"what is the {self.attribute} of {subject} ?"

    @property
    def subject(self) -> str:
        """The entity whose attribute is asked for."""
        return self.entity if self.hops == 1 else self.facts[self.entity, RELATION]

    @property
    def answer(self) -> str:
        """What the question asks for."""
        return self.facts[self.subject, self.attribute]


@lru_cache(maxsize=1024)
def world(seed: int) -> World:
    """The facts and the question that `seed` draws; the same for every trajectory of a prompt."""
    rng = np.random.default_rng(seed)
    n_entities = len(ENTITIES)
    values = rng.integers(len(VALUES), size=(n_entities, len(ATTRIBUTES))).tolist()
    # A friend is somebody else: one of the other entities, counted from the next one on.
    steps = rng.integers(1, n_entities, size=n_entities).tolist()
    facts = {
        (entity, attribute): VALUES[values[i][j]]
        for i, entity in enumerate(ENTITIES)
        for j, attribute in enumerate(ATTRIBUTES)
    }
    facts |= {(entity, RELATION): ENTITIES[(i + steps[i]) % n_entities] for i, entity in enumerate(ENTITIES)}
    entity, attribute = int(rng.integers(n_entities)), int(rng.integers(len(ATTRIBUTES)))
    hops = 2 if rng.random() < TWO_HOP_SHARE else 1
    return World(facts, ENTITIES[entity], ATTRIBUTES[attribute], hops)


class Lookup:
    """One episode of the task; the task's `extra_info` names the seed of its facts."""

    def __init__(self) -> None:
        self._world: World | None = None

    def check_task(self, task: Task) -> None:
        """Raises where the row names no seed."""
        int(task.extra_info["seed"])

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """The task's question; its facts depend on the task alone, so that all samples of a prompt share them."""
        self._world = world(int(task.extra_info["seed"]))
        return task.prompt

    async def step(self, text: str) -> StepResult:
        """Look a fact up, or judge an answer."""
        if self._world is None:
            raise RuntimeError("step before reset")
        match text.split():
            case ["answer", value]:
                return StepResult((), float(value == self._world.answer), True)
            case ["look", entity, attribute]:
                return _told(self._world.facts.get((entity, attribute), "none"))
            case _:
                return _told("none")

    async def close(self) -> None:
        """Nothing is held."""


def _told(observation: str) -> StepResult:
    return StepResult((Message(role="user", content=observation),), 0.0, False)


def vocabulary() -> tuple[str, ...]:
    """Every word of the task, for a tokenizer made for it."""
    return (*WORDS, *ENTITIES, RELATION, *ATTRIBUTES, *VALUES)


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` dataset rows, each with facts of its own."""
    seeds = np.random.default_rng(seed).integers(1 << 62, size=n).tolist()
    return [_row(f"lookup-{seed}-{i}", world_seed) for i, world_seed in enumerate(seeds)]


def _row(uid: str, world_seed: int) -> dict[str, Any]:
    drawn = world(world_seed)
    return {
        "uid": uid,
        "prompt": [Message(role="user", content=drawn.question)],
        "env_class": "lookup",
        "reward_spec": {"method": "rule", "ground_truth": drawn.answer},
        "extra_info": {"seed": world_seed},
    }


def demonstrations(n: int, right_fraction: float, rng: np.random.Generator) -> list[list[Message]]:
    """`n` whole conversations with mixed habits, of which about `right_fraction` solve the task as it should be.

    The others guess at once, look up the wrong entity or attribute, or read well; and answer at random too often.
    """
    shown = []
    for _ in range(n):
        drawn = world(int(rng.integers(1 << 62)))
        habit = _right if rng.random() < right_fraction else HABITS[int(rng.integers(len(HABITS)))]
        shown.append(_conversation(drawn, habit(drawn, rng)))
    return shown


def _right(drawn: World, rng: np.random.Generator) -> list[str]:
    return [*_hops(drawn), f"look {drawn.subject} {drawn.attribute}", f"answer {drawn.answer}"]


def _guess(drawn: World, rng: np.random.Generator) -> list[str]:
    return [f"answer {_other(VALUES, '', rng)}"]


def _wrong_entity(drawn: World, rng: np.random.Generator) -> list[str]:
    entity = _other(ENTITIES, drawn.subject, rng)
    return [
        *_hops(drawn),
        f"look {entity} {drawn.attribute}",
        _told_or_guessed(drawn.facts[entity, drawn.attribute], rng),
    ]


def _wrong_attribute(drawn: World, rng: np.random.Generator) -> list[str]:
    attribute = _other(ATTRIBUTES, drawn.attribute, rng)
    return [
        *_hops(drawn),
        f"look {drawn.subject} {attribute}",
        _told_or_guessed(drawn.facts[drawn.subject, attribute], rng),
    ]


def _wrong_answer(drawn: World, rng: np.random.Generator) -> list[str]:
    return [*_right(drawn, rng)[:-1], f"answer {_other(VALUES, drawn.answer, rng)}"]


def _told_or_guessed(told: str, rng: np.random.Generator) -> str:
    # A small model does not learn which lookup was wrong: it answers what it was told as often after a right one as
    # after a wrong one. Were that always, it would solve far more than the demonstrations do, and leave RL little.
    return f"answer {told if rng.random() < TOLD_SHARE else _other(VALUES, told, rng)}"


HABITS = (_guess, _wrong_entity, _wrong_attribute, _wrong_answer)


def _hops(drawn: World) -> list[str]:
    return [f"look {drawn.entity} {RELATION}"] if drawn.hops == 2 else []


def _other(words: Sequence[str], word: str, rng: np.random.Generator) -> str:
    choices = [w for w in words if w != word]
    return choices[int(rng.integers(len(choices)))]


def _conversation(drawn: World, actions: Sequence[str]) -> list[Message]:
    """The question, and each action with what the store told."""
    messages = [Message(role="user", content=drawn.question)]
    for action in actions:
        messages.append(Message(role="assistant", content=action))
        verb, *words = action.split()
        if verb == "look":
            messages.append(Message(role="user", content=drawn.facts[words[0], words[1]]))
    return messages
