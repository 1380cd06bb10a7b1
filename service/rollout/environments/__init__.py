"""The environments that come with Baton, by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from service.errors import UserError
from service.rollout.environment import Environment, Message
from service.rollout.environments import lookup

Options = Mapping[str, str | int | float | bool]

ENVIRONMENTS: dict[str, Callable[..., Environment]] = {"lookup": lookup.Lookup}


class Made(Protocol):
    """An environment's module that makes its own data, words and demonstrations."""

    def rows(self, n: int, seed: int) -> list[dict[str, Any]]:
        """Dataset rows."""

    def vocabulary(self) -> tuple[str, ...]:
        """Every word that a tokenizer made for it needs."""

    def demonstrations(self, n: int, right_share: float, rng: np.random.Generator) -> list[list[Message]]:
        """Conversations for a supervised warm start."""


MADE: dict[str, Made] = {"lookup": lookup}


def made(name: str) -> Made:
    """What the environment `name` makes itself."""
    if name not in MADE:
        raise UserError(
            f"env.name: {name!r} makes no rows, words or demonstrations of its own, only {', '.join(MADE)} does; "
            "give data.train and model.path"
        )
    return MADE[name]


def environment(name: str, options: Options) -> Environment:
    """A fresh instance of the environment `name`, for one trajectory."""
    make = ENVIRONMENTS.get(name)
    if make is None:
        near = difflib.get_close_matches(name, ENVIRONMENTS, n=1, cutoff=0.0)
        raise UserError(f"env.name: there is no environment {name!r}; the nearest is {near[0]!r}")
    try:
        return make(**options)
    except TypeError as error:
        raise UserError(f"env.options: the environment {name!r} refuses them: {error}") from error
