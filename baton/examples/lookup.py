"""The quick start's task: look up facts in a store, then answer. A small version of Search-R1.

Every prompt has its own table of facts, so that a policy has to look up and cannot memorise:

    user: what is the age of the friend of fox ?      the store knows: fox friend -> owl, owl age -> 17, ...
    assistant: look fox friend                        user: owl
    assistant: look owl age                           user: 17
    assistant: answer 17                              reward 1, done

A third of the questions have two hops, as in this example; the others have one hop ("what is the age of fox ?"). The
observation is `none` if the text is no action, or if the store lacks the fact. `answer` ends the episode in any turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from baton import Message, StepResult, Task

ENTITIES = (
    *("ant", "bat", "bear", "bee", "boar", "cat", "cow", "crab", "crow", "deer", "dog", "dove"),
    *("duck", "eel", "elk", "fox", "frog", "goat", "hare", "hawk", "hen", "ibis", "lynx", "owl"),
)
ATTRIBUTES = ("age", "weight", "height", "speed")
RELATION = "friend"
VALUES = tuple(str(value) for value in range(1, 25))
WORDS = ("what", "is", "the", "of", "?", "look", "answer", "none")
TWO_HOP_FRACTION = 1 / 3
REPEAT_FRACTION = 0.55
"""Fraction of the demonstrations with a wrong lookup that answer with the value of this lookup."""


class Puzzle(NamedTuple):
    """The question of one prompt, and the facts that its store holds."""

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
        """The entity whose attribute the question is about: `owl` in the module's example."""
        return self.entity if self.hops == 1 else self.facts[self.entity, RELATION]

    @property
    def answer(self) -> str:
        """The right answer."""
        return self.facts[self.subject, self.attribute]


@lru_cache(maxsize=1024)
def puzzle(seed: int) -> Puzzle:
    """Draw the puzzle of `seed`. All trajectories of a prompt have the same seed."""
    rng = np.random.default_rng(seed)
    n_entities = len(ENTITIES)
    values = rng.integers(len(VALUES), size=(n_entities, len(ATTRIBUTES))).tolist()
    # No entity is its own friend: the friend is 1 to n - 1 entities further on.
    steps = rng.integers(1, n_entities, size=n_entities).tolist()
    facts = {
        (entity, attribute): VALUES[values[i][j]]
        for i, entity in enumerate(ENTITIES)
        for j, attribute in enumerate(ATTRIBUTES)
    }
    facts |= {(entity, RELATION): ENTITIES[(i + steps[i]) % n_entities] for i, entity in enumerate(ENTITIES)}
    entity, attribute = int(rng.integers(n_entities)), int(rng.integers(len(ATTRIBUTES)))
    hops = 2 if rng.random() < TWO_HOP_FRACTION else 1
    return Puzzle(facts, ENTITIES[entity], ATTRIBUTES[attribute], hops)


class Lookup:
    """The environment: an object plays one episode. The row's `extra_info` holds the seed of the episode's facts."""

    def check_task(self, task: Task) -> None:
        """Raises if the row has no seed."""
        int(task.extra_info["seed"])

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """The row's prompt. The facts depend only on the row, so that all samples of a prompt share them."""
        self._puzzle = puzzle(int(task.extra_info["seed"]))
        return task.prompt

    async def step(self, text: str) -> StepResult:
        """Look up a fact, or score an answer."""
        match text.split():
            case ["answer", value]:
                return StepResult((), float(value == self._puzzle.answer), True)
            case ["look", entity, attribute]:
                return _observation(self._puzzle.facts.get((entity, attribute), "none"))
            case _:
                return _observation("none")

    async def close(self) -> None:
        """Do nothing: the episode holds no resources."""


def _observation(text: str) -> StepResult:
    return StepResult((Message(role="user", content=text),), 0.0, False)


def vocabulary() -> tuple[str, ...]:
    """Every word of the task, for a word-level tokenizer."""
    return (*WORDS, *ENTITIES, RELATION, *ATTRIBUTES, *VALUES)


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` dataset rows, each with its own facts."""
    seeds = np.random.default_rng(seed).integers(1 << 62, size=n).tolist()
    return [
        {
            "uid": f"lookup-{seed}-{i}",
            "prompt": [Message(role="user", content=puzzle(world_seed).question)],
            "env_class": "lookup",
            "reward_spec": {"method": "rule", "ground_truth": puzzle(world_seed).answer},
            "extra_info": {"seed": world_seed},
        }
        for i, world_seed in enumerate(seeds)
    ]


def demonstrations(n: int, right_fraction: float, rng: np.random.Generator) -> list[list[Message]]:
    """`n` complete conversations. About `right_fraction` of them solve the task.

    The others guess at once, look up the wrong entity or attribute, or look up the right fact and answer at random.
    """
    shown = []
    for _ in range(n):
        drawn = puzzle(int(rng.integers(1 << 62)))
        solved = rng.random() < right_fraction
        shown.append(_conversation(drawn, _solution(drawn) if solved else _wrong_actions(drawn, rng)))
    return shown


def _solution(drawn: Puzzle) -> list[str]:
    return [*_first_hop(drawn), f"look {drawn.subject} {drawn.attribute}", f"answer {drawn.answer}"]


def _first_hop(drawn: Puzzle) -> list[str]:
    return [f"look {drawn.entity} {RELATION}"] if drawn.hops == 2 else []


def _wrong_actions(drawn: Puzzle, rng: np.random.Generator) -> list[str]:
    entity, attribute = drawn.subject, drawn.attribute
    match int(rng.integers(4)):
        case 0:
            return [f"answer {_other(VALUES, '', rng)}"]
        case 1:
            entity = _other(ENTITIES, entity, rng)
        case 2:
            attribute = _other(ATTRIBUTES, attribute, rng)
        case _:
            return [*_solution(drawn)[:-1], f"answer {_other(VALUES, drawn.answer, rng)}"]
    # A small model cannot learn which lookup is wrong. It learns how often demonstrations answer with the value that
    # they read. If all did, it would solve far more tasks than they do, and RL would have little to improve.
    read = drawn.facts[entity, attribute]
    answer = read if rng.random() < REPEAT_FRACTION else _other(VALUES, read, rng)
    return [*_first_hop(drawn), f"look {entity} {attribute}", f"answer {answer}"]


def _other(words: Sequence[str], word: str, rng: np.random.Generator) -> str:
    choices = [w for w in words if w != word]
    return choices[int(rng.integers(len(choices)))]


def _conversation(drawn: Puzzle, actions: Sequence[str]) -> list[Message]:
    """A conversation of the question, the actions, and their observations."""
    messages = [Message(role="user", content=drawn.question)]
    for action in actions:
        messages.append(Message(role="assistant", content=action))
        verb, *words = action.split()
        if verb == "look":
            messages.append(Message(role="user", content=drawn.facts[words[0], words[1]]))
    return messages
