"""Environments by name.

env.name: gsm8k                       a demonstration of Baton, or an entry point of an installed package in the group
                                      `baton.environments`
env.name: skyrl_gym/search            an environment of another library, through its adapter
env.name: my_package.envs:Maze        a class of your own, in a module that `env.trusted_modules` names
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from service.errors import UserError
from service.rollout.environment import Environment, Message

Options = Mapping[str, str | int | float | bool]

GROUP = "baton.environments"

ENVIRONMENTS = {
    "gsm8k": "examples.gsm8k:Gsm8k",
    "lookup": "examples.lookup:Lookup",
    "search_r1": "examples.search_r1:SearchR1",
    "text_to_sql": "examples.text_to_sql:TextToSql",
}
ADAPTERS = {
    "reasoning_gym": "service.rollout.environments.reasoning_gym:ReasoningGym",
    "skyrl_gym": "service.rollout.environments.skyrl_gym:SkyRLGym",
}
"""By the part of the name before the slash; the part after it is the adapter's first argument."""


def make_environment(name: str, options: Options, trusted_modules: Sequence[str] = ()) -> Environment:
    """A new instance of the environment `name`, for one trajectory.

    Raises:
        UserError: there is no such environment, or its constructor fails with these options.
    """
    family, slash, member = name.partition("/")
    make = find_environment(name, trusted_modules)
    try:
        return make(member, **options) if slash and family in ADAPTERS else make(**options)
    except UserError:
        raise
    except TypeError as error:
        raise UserError(f"env.options: the environment {name!r} refuses them: {error}") from error
    except (Exception, SystemExit) as error:  # a user's constructor may raise anything
        raise UserError(f"env.name: {name!r} cannot be made: {type(error).__name__}: {error}") from error


def find_environment(name: str, trusted_modules: Sequence[str] = ()) -> Callable[..., Environment]:
    """The class behind a name.

    Raises:
        UserError: there is no such environment, or its module is not trusted.
    """
    family, slash, member = name.partition("/")
    if slash and member and family in ADAPTERS:
        return _load(ADAPTERS[family], name)
    if name in ENVIRONMENTS:
        return _load(ENVIRONMENTS[name], name)
    if ":" in name:
        return _trusted(name, trusted_modules)
    paths = registered()
    if name in paths:
        return _load(paths[name], name)
    raise _unknown(name, [*ENVIRONMENTS, *paths])


@cache
def registered() -> Mapping[str, str]:
    """Name -> `module:Class` of the environments that installed packages register; cached, as each trajectory asks."""
    return {point.name: point.value for point in entry_points(group=GROUP)}


def _unknown(name: str, known: Sequence[str]) -> UserError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return UserError(
        f"env.name: there is no environment {name!r}; the nearest is {near!r}. "
        "A class of your own is named module:Class, with its module under env.trusted_modules"
    )


def _trusted(path: str, trusted_modules: Sequence[str]) -> Callable[..., Environment]:
    module = path.partition(":")[0]
    if not any(module == trusted or module.startswith(f"{trusted}.") for trusted in trusted_modules):
        raise UserError(f"env.name: {path!r} is not loaded, for env.trusted_modules does not name {module!r}")
    return _load(path, path)


def _load(path: str, name: str) -> Callable[..., Environment]:
    module_name, _, attribute = path.partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        raise UserError(
            f"env.name: the environment {name!r} cannot be loaded, importing {module_name} failed: "
            f"{type(error).__name__}: {error} (modules are looked up in {Path.cwd()} and among installed packages)"
        ) from error
    found: Callable[..., Environment] | None = getattr(module, attribute, None)
    if found is None:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
        raise UserError(f"env.name: the environment {name!r} cannot be loaded, {module_name} has no {attribute}{hint}")
    return found


SyntheticFunction = Literal["rows", "vocabulary", "demonstrations"]


class SyntheticData(Protocol):
    """A module or object that generates data for an environment: rows, words and demonstrations."""

    def rows(self, n: int, seed: int) -> list[dict[str, Any]]:
        """`n` dataset rows."""

    def vocabulary(self) -> tuple[str, ...]:
        """Every word that a word-level tokenizer for the environment needs."""

    def demonstrations(self, n: int, right_fraction: float, rng: np.random.Generator) -> list[list[Message]]:
        """`n` conversations for a supervised warm start, of which about `right_fraction` solve their task."""


SYNTHETIC_DATA = {
    "gsm8k": "examples.gsm8k",
    "lookup": "examples.lookup",
    "search_r1": "examples.synthetic_search",
    "text_to_sql": "examples.synthetic_sql",
}


def synthetic_data(
    name: str,
    options: Options | None = None,
    trusted_modules: Sequence[str] = (),
    needed: SyntheticFunction = "rows",
) -> SyntheticData:
    """The generator of synthetic data for the environment `name`, made with these options.

    For `module:Class` it is the module, which has to have the function `needed` and may lack the others.

    Raises:
        UserError: there is none, or it lacks what is needed.
    """
    family, _, member = name.partition("/")
    if family == "reasoning_gym" and member:
        from service.rollout.environments.reasoning_gym import SyntheticReasoningGym

        return SyntheticReasoningGym(member, options or {})
    path = SYNTHETIC_DATA.get(name)
    if ":" in name:
        _trusted(name, trusted_modules)
        path = name.partition(":")[0]
    if path is None:
        raise UserError(
            f"env.name: {name!r} makes no rows, words or demonstrations of its own, only {', '.join(SYNTHETIC_DATA)} "
            "do; give data.train and model.path"
        )
    module: SyntheticData = import_module(path)
    if not callable(getattr(module, needed, None)):
        raise UserError(
            f"env.name: {name!r} makes no {needed}: its module has no function `{needed}`; write it "
            "(docs/environments.md), or give data.train and model.path"
        )
    return module
