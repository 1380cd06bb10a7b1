"""Scorers written by users: a function or a class in one of their modules."""

from __future__ import annotations

import asyncio
import difflib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from service.config.rollout import ScorerConfig
from service.errors import ConfigError
from service.handoff.scoring import Answer
from service.scorers.reply import Failure, Logprobs, ScorerFailed, answer_of
from service.scorers.scored_trajectories import Trajectory
from service.user_code import enter_user_folder, import_user_module


def imported(name: str, settings: ScorerConfig) -> Callable[..., Any]:
    """The function or class that `scorers.<name>.use` names.

    Raises:
        ConfigError: the module has no such function or class, importing it failed, or it does not take the options.
    """
    module, _, attribute = (settings.use or "").partition(":")
    method = "logprobs" if settings.kind == "teacher" else "score"
    enter_user_folder()
    try:
        own = import_user_module(module)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"scorers.{name}.use: {settings.use}: {type(error).__name__}: {error}") from error
    found: Any = getattr(own, attribute, None)
    if not callable(getattr(found, method, None) if isinstance(found, type) else found):
        near = [] if found is not None else difflib.get_close_matches(attribute, dir(own), n=1)
        hint = f"; did you mean {module}:{near[0]}?" if near else ""
        what = f"is no function, and no class with a method {method}"
        raise ConfigError(f"scorers.{name}.use: {settings.use} {what}{hint}")
    if settings.options and not isinstance(found, type):
        raise ConfigError(f"scorers.{name}.options: are for a class, but {settings.use} is a function; leave them out")
    if isinstance(found, type):
        try:
            inspect.signature(found).bind(**settings.options)
        except TypeError as error:
            raise ConfigError(f"scorers.{name}.options: {settings.use} does not take them: {error}") from error
    return found  # type: ignore[no-any-return]


def check_scorers(scorers: Mapping[str, ScorerConfig]) -> None:
    """Import the scorers' modules; constructs no instances, because a judge may load a model then.

    Raises:
        ConfigError: see `imported`.
    """
    for name, settings in scorers.items():
        if settings.use is not None:
            imported(name, settings)


def user_function(name: str, settings: ScorerConfig) -> Callable[[Any], Any]:
    """The function behind `scorers.<name>.use`, or the method of an instance of the class.

    Raises:
        ConfigError: see `imported`; or the constructor of the class failed.
    """
    found = imported(name, settings)
    if not isinstance(found, type):
        return found
    try:
        scorer = found(**settings.options)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"scorers.{name}.use: {settings.use}: {type(error).__name__}: {error}") from error
    return scorer.logprobs if settings.kind == "teacher" else scorer.score  # type: ignore[no-any-return]


def user_rewards(function: Callable[[Any], Any]) -> Callable[[Sequence[Trajectory]], Awaitable[Answer]]:
    """Rewards of trajectories from a user's function."""

    async def rewards(trajectories: Sequence[Trajectory]) -> Answer:
        return answer_of(await _called(function, trajectories), len(trajectories))

    return rewards


def user_logprobs(function: Callable[[Any], Any]) -> Logprobs:
    """A teacher's log-probabilities from a user's function of token ids."""

    async def logprobs(token_ids: list[int]) -> Sequence[float | None]:
        given = await _called(function, token_ids)
        return given.tolist() if hasattr(given, "tolist") else given  # type: ignore[no-any-return]

    return logprobs


async def _called(function: Callable[[Any], Any], argument: object) -> Any:
    """Call a user's function in a thread.

    Raises:
        ScorerFailed: it raised.
    """
    try:
        return await asyncio.to_thread(function, argument)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's code may raise anything
        raise ScorerFailed(Failure.RAISED, f"{type(error).__name__}: {error}"[:200]) from None
