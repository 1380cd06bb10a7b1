"""Three synthetic workloads: episodes of agents with realistic numbers of turns and tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from service.columns import digest
from service.types import Extension, Int32s, Step, TrajectoryEnd, TrajectoryId

VOCAB_SIZE = 150_000
SAMPLES = 8
"""Trajectories of a group."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Episodes of several groups, in the full form: each step carries its whole prompt."""

    name: str
    episodes: list[list[Step]]
    rewards_G: list[float]

    @property
    def new_tokens(self) -> int:
        """The number of tokens without repetitions: first prompts, observations and responses."""
        return sum(len(e[-1].prompt_ids) + len(e[-1].response_ids) for e in self.episodes)

    def ends(self) -> list[TrajectoryEnd]:
        """The end of each episode."""
        return [
            TrajectoryEnd(e[0].trajectory, e[0].prompt_uid, len(e), "stop", reward)
            for e, reward in zip(self.episodes, self.rewards_G, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths of the parts of an episode: uniform between two bounds."""

    prompt: tuple[int, int]
    response: tuple[int, int]
    observation: tuple[int, int]


SEARCH = Shape(prompt=(100, 300), response=(30, 120), observation=(100, 300))
ENGINEERING = Shape(prompt=(1500, 3000), response=(60, 300), observation=(200, 900))


def search(groups: int = 64, seed: int = 0) -> Workload:
    """Short search episodes of 2 to 4 turns."""
    rng = np.random.default_rng(seed)
    return _workload("search, 2-4 turns", groups, SEARCH, lambda: int(rng.integers(2, 5)), 1 << 30, rng)


def engineering(groups: int = 4, turns: int = 40, seed: int = 0) -> Workload:
    """Software-engineering episodes of 40 turns, up to 32k tokens."""
    rng = np.random.default_rng(seed)
    return _workload(f"engineering, {turns} turns", groups, ENGINEERING, lambda: turns, 32_768, rng)


def long_tail(groups: int = 16, seed: int = 0) -> Workload:
    """A mix with a long tail: lognormal numbers of turns, 1 to 50."""
    rng = np.random.default_rng(seed)
    return _workload(
        "long tail, 1-50 turns", groups, ENGINEERING, lambda: int(np.clip(rng.lognormal(1.6, 1.0), 1, 50)), 32_768, rng
    )


def _workload(
    name: str, groups: int, shape: Shape, turns: Callable[[], int], max_tokens: int, rng: np.random.Generator
) -> Workload:
    episodes, rewards_G = [], []
    for group_id in range(groups):
        for sample in range(SAMPLES):
            episodes.append(_episode(TrajectoryId(group_id, sample), f"p{group_id}", shape, turns(), max_tokens, rng))
            rewards_G.append(float(rng.integers(0, 2)))
    return Workload(name, episodes, rewards_G)


def _episode(
    trajectory: TrajectoryId, uid: str, shape: Shape, turns: int, max_tokens: int, rng: np.random.Generator
) -> list[Step]:
    def tokens(bounds: tuple[int, int]) -> Int32s:
        return rng.integers(0, VOCAB_SIZE, rng.integers(*bounds), dtype=np.int32)

    history, steps = tokens(shape.prompt), []
    for index in range(turns):
        response = tokens(shape.response)
        if len(history) + len(response) > max_tokens:
            break
        logprobs, mask = -np.linspace(0.01, 2, len(response), dtype=np.float32), np.ones(len(response), np.bool_)
        versions = np.zeros(len(response), np.int64)
        steps.append(Step(trajectory, uid, index, history, response, logprobs, mask, versions))
        history = np.concatenate((history, response, tokens(shape.observation)))
    return steps


def shared(episode: list[Step]) -> list[Step]:
    """The same steps, each with only the tokens that the previous step lacks."""

    steps = episode[:1]
    for before, now in pairwise(episode):
        length = len(before.prompt_ids) + len(before.response_ids)
        extension = Extension(before.index, length, digest(now.prompt_ids[:length]))
        steps.append(replace(now, prompt_ids=now.prompt_ids[length:], extends=extension))
    return steps


def turns(count: int, groups: int, seed: int = 0) -> Workload:
    """Episodes of exactly this number of turns, with the lengths of `search`."""
    rng = np.random.default_rng(seed)
    shape = Shape(prompt=(200, 201), response=SEARCH.response, observation=SEARCH.observation)
    return _workload(f"{count} turns", groups, shape, lambda: count, 1 << 30, rng)
