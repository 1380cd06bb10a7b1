"""Finds environments by name.

env.name: gsm8k                       a demonstration of Baton, or an entry point of an installed package in the group
                                      `baton.environments`
env.name: my_package.envs:Maze        a class of your own, in a module that `env.trusted_modules` names
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Literal

from service.config.rollout import AGENT, COMPUTE_SCORE
from service.errors import UserError
from service.rollout.environment import Environment, is_text
from service.rollout.user_errors import describe_error
from service.user_code import enter_user_folder, import_object, import_user_module

Options = Mapping[str, str | int | float | bool]

GROUP = "baton.environments"

ENVIRONMENTS = {
    COMPUTE_SCORE: "baton.examples.adapters.verl:ComputeScore",
    "gsm8k": "baton.examples.gsm8k:Gsm8k",
    "guess_number": "baton.examples.guess_number:GuessNumber",
    "harbor": "baton.harbor:Trial",
    "lookup": "baton.examples.lookup:Lookup",
    "lookup_agent": "baton.examples.lookup_agent:LookupAgent",
    "reading": "baton.examples.reading:Reading",
    "reasoning_gym": "baton.examples.adapters.reasoning_gym:ReasoningGym",
    "search_r1": "baton.examples.search_r1:SearchR1",
    "skyrl_gym": "baton.examples.adapters.skyrl_gym:SkyRLGym",
    "solver_verifier": "baton.examples.solver_verifier:SolverVerifier",
    "text_to_sql": "baton.examples.text_to_sql:TextToSql",
}


def make_environment(name: str, options: Options, trusted_modules: Sequence[str] = ()) -> Environment:
    """Make an instance of the environment `name` for one trajectory. First the user's folder becomes the current
    folder.

    Raises:
        UserError: there is no such environment, or its constructor fails with these options.
    """
    enter_user_folder()  # an earlier environment may have changed the folder
    make, given = environment_class(name, trusted_modules), dict[str, Any](options)
    if name == COMPUTE_SCORE:
        given["function"] = import_object("env.compute_score", str(options.get("function")))[1]
    try:
        return make(**given)
    except UserError:
        raise
    except TypeError as error:
        raise UserError(f"env.options: the environment {name!r} refuses them: {error}") from error
    except (Exception, SystemExit) as error:  # a user's constructor may raise anything
        raise UserError(f"env.name: {name!r} cannot be made: {type(error).__name__}: {error}") from error


def environment_class(name: str, trusted_modules: Sequence[str] = ()) -> Callable[..., Environment]:
    """The class of the environment `name`, or a function that makes the environment.

    Raises:
        UserError: there is no such environment.
    """
    make: Callable[..., Environment] = _loaded(name, trusted_modules)[1]
    return make


@cache
def registered() -> Mapping[str, str]:
    """The environments that installed packages register, by name, each as `module:Class`. Cached, because every
    trajectory asks for them."""
    return {point.name: point.value for point in entry_points(group=GROUP)}


def _path(name: str, trusted_modules: Sequence[str]) -> str:
    if ":" in name:
        module = name.partition(":")[0]
        if not any(module == trusted or module.startswith(f"{trusted}.") for trusted in trusted_modules):
            raise UserError(f"env.name: {name!r} is not loaded, for env.trusted_modules does not name {module!r}")
        return name
    paths = {**registered(), **ENVIRONMENTS}
    if name not in paths:
        near = difflib.get_close_matches(name, paths, n=1)
        meant = f"the nearest is {near[0]!r}" if near else f"there are {', '.join(paths)}"
        raise UserError(
            f"env.name: there is no environment {name!r:.80}; {meant}. "
            "A class of your own is named module:Class, with its module under env.trusted_modules"
        )
    return paths[name]


def _loaded(name: str, trusted_modules: Sequence[str]) -> tuple[ModuleType, Any]:
    """The module and the class of an environment."""
    path = _path(name, trusted_modules)
    return import_object("env.name", path, import_user_module if path == name else import_module)


SyntheticFunction = Literal["rows", "vocabulary", "demonstrations"]
IS_MADE: Mapping[SyntheticFunction, Callable[[Any], bool]] = {
    "rows": lambda row: isinstance(row, dict),
    "vocabulary": is_text,
    "demonstrations": lambda messages: isinstance(messages, list | tuple) and all(map(_is_message, messages)),
}
"""Whether a value may be among the results of each function."""
INSTEAD = "give data.train (and data.eval), and model.path"


def synthetic_data(name: str, trusted_modules: Sequence[str], needed: SyntheticFunction) -> Callable[..., list[Any]]:
    """The function `needed` of the environment's module, which makes synthetic data:

    rows(n, seed)                             `n` dataset rows
    vocabulary()                              all words that a word-level tokenizer for the environment needs
    demonstrations(n, right_fraction, rng)    `n` conversations for a supervised warm start; about the fraction
                                              `right_fraction` of them solves its task

    Raises:
        UserError: the environment cannot be loaded, or its module lacks the function; by the function: it raised an
            error, or made something else.
    """
    if name == AGENT:
        raise UserError(f"env.name: {AGENT!r} runs a command, which makes no {needed}; {INSTEAD}")
    function = getattr(_loaded(name, trusted_modules)[0], needed, None)
    if not callable(function):
        raise UserError(
            f"env.name: {name!r} makes no {needed}: its module has no function `{needed}`; write it "
            f"(docs/environments.md), or {INSTEAD}"
        )

    def make(*arguments: Any) -> list[Any]:
        try:
            made = list(function(*arguments))
            if wrong := [one for one in made if not IS_MADE[needed](one)]:
                raise TypeError(f"{wrong[0]!a:.80} is among its results")
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise UserError(f"env.name: the function {needed} of {name!r} failed: {describe_error(error)}") from error
        return made

    return make


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and is_text(value.get("role")) and is_text(value.get("content"))
