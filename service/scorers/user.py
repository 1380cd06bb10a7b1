"""Scorers written by users: a function or a class in one of their modules."""

from __future__ import annotations

import asyncio
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from service.config.rollout import ScorerConfig
from service.errors import ConfigError
from service.handoff.scoring import Answer
from service.scorers.reply import Failure, ScorerFailed, answer_of
from service.scorers.scored_trajectories import Trajectory
from service.user_code import enter_user_folder, import_user_module


def imported(name: str, settings: ScorerConfig) -> Callable[..., Any]:
    """The function or class that `scorers.<name>.use` names.

    Raises:
        ConfigError: the module has no such function or class, the import failed, or the function or class does not take
            the options.
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
    """Import the scorers' modules; constructs no instances, because the constructor of a judge may load a model.

    Raises:
        ConfigError: see `imported`.
    """
    for name, settings in scorers.items():
        if settings.use is not None:
            imported(name, settings)


class UserScorer:
    """Calls the function that `scorers.<name>.use` names, or the method of an instance of the named class."""

    def __init__(self, name: str, settings: ScorerConfig) -> None:
        """
        Raises:
            ConfigError: see `imported`; or the constructor of the class failed.
        """
        self._function: Callable[[Any], Any] = imported(name, settings)
        if isinstance(self._function, type):
            try:
                scorer = self._function(**settings.options)
            except Exception as error:  # a user's module may raise anything
                raise ConfigError(f"scorers.{name}.use: {settings.use}: {type(error).__name__}: {error}") from error
            self._function = scorer.logprobs if settings.kind == "teacher" else scorer.score

    async def rewards(self, trajectories: Sequence[Trajectory]) -> Answer:
        """Rewards of trajectories; raises `ScorerFailed` if the function raises or its answer is not valid."""
        return answer_of(await self._called(trajectories), len(trajectories))

    async def logprobs(self, token_ids: list[int]) -> Sequence[float | None]:
        """The log-probability of each token given the tokens before it; raises `ScorerFailed` if the
        function raises."""
        given = await self._called(token_ids)
        return given.tolist() if hasattr(given, "tolist") else given  # type: ignore[no-any-return]

    async def _called(self, argument: object) -> Any:
        """Call the function in a thread; raises `ScorerFailed` if it raises."""
        try:
            return await asyncio.to_thread(self._function, argument)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's code may raise anything
            raise ScorerFailed(Failure.RAISED, f"{type(error).__name__}: {error}"[:200]) from None
