"""Scorers written by users: a function or a class in one of their modules, and the trajectories that it gets."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from service.config.rollout import ScorerConfig
from service.errors import ConfigError
from service.handoff.scoring import Answer
from service.handoff.steps.tables import end_objects, step_objects
from service.handoff.steps.values import roles_from
from service.rollout.environment import Task
from service.rollout.user_errors import describe_error
from service.scorers.reply import Failure, ScorerFailed, answer_of
from service.types import StepGroup
from service.user_code import enter_user_folder, import_object


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the policy in a trajectory, as a scorer gets it."""

    prompt: str
    """The new part of the prompt. In the first turn this is the whole prompt; in later turns, the text that follows the
    tokens of an earlier turn."""
    response: str
    prompt_ids: list[int]
    response_ids: list[int]
    reward: float
    """The environment's reward of the turn, including rewards that it gave the turn later."""
    stop_reason: str
    role: str
    """The role of the turn: `main` unless the configuration names `roles`, or an agent has conversations with other
    roles."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One trajectory of a group, as a scorer that gives rewards gets it."""

    uid: str
    """The unique id of the prompt in the dataset."""
    sample: int
    task: Mapping[str, Any]
    """The row of the dataset: prompt, reward_spec, extra_info, ..."""
    turns: Sequence[Turn]
    reward: float
    """The environment's reward at the end of the trajectory."""
    stop_reason: str
    transcript: str
    """The output of an agent's run."""

    @property
    def text(self) -> str:
        """The texts of all turns, in order."""
        return "".join(turn.prompt + turn.response for turn in self.turns)


def trajectories_of(
    group: StepGroup, task: Task, decode: Callable[[Sequence[int]], str], named: Sequence[str] = ()
) -> list[Trajectory]:
    """The trajectories of a group, in the order of the samples.

    `decode` turns token ids into text with special tokens; `named`: the roles that the configuration names.
    """
    row, turns, ends = asdict(task), dict[int, list[Turn]](), end_objects(group.ends)
    roles = {end.trajectory: roles_from(end.roles, end.n_steps, named) for end in ends}
    later = {end.trajectory: end.rewards for end in ends if end.rewards}
    for step in sorted(step_objects(group.steps), key=lambda step: step.index):
        prompt: list[int] = step.prompt_ids.tolist()
        response: list[int] = step.response_ids.tolist()
        of, index = step.trajectory, step.index
        reward = float(np.sum(step.reward)) + (later[of][index] if of in later else 0.0)
        turn = Turn(decode(prompt), decode(response), prompt, response, reward, step.stop_reason, roles[of][index])
        turns.setdefault(step.trajectory.sample, []).append(turn)
    return [
        Trajectory(
            end.prompt_uid,
            end.trajectory.sample,
            row,
            turns.get(end.trajectory.sample, []),
            end.reward,
            end.stop_reason,
            end.transcript.decode(errors="replace"),
        )
        for end in ends
    ]


def imported(name: str, settings: ScorerConfig) -> Callable[..., Any]:
    """The function or class that `scorers.<name>.use` names.

    Raises:
        ConfigError: the module has no such function or class, the import failed, or the function or class does not take
            the options.
    """
    method = "logprobs" if settings.kind == "teacher" else "score"
    enter_user_folder()
    _, found = import_object(f"scorers.{name}.use", settings.use or "")
    if not callable(getattr(found, method, None) if isinstance(found, type) else found):
        what = f"is no function, and no class with a method {method}"
        raise ConfigError(f"scorers.{name}.use: {settings.use} {what}")
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
            except (Exception, SystemExit) as error:  # a user's class may raise anything
                raise ConfigError(f"scorers.{name}.use: {settings.use}: {type(error).__name__}: {error}") from error
            self._function = scorer.logprobs if settings.kind == "teacher" else scorer.score

    async def rewards(self, trajectories: Sequence[Trajectory]) -> Answer:
        """Rewards of trajectories; raises `ScorerFailed` if the function raises or its answer is not valid."""
        return answer_of(await asyncio.to_thread(self._called, trajectories), len(trajectories))

    async def logprobs(self, token_ids: list[int]) -> Sequence[float | None]:
        """The log-probability of each token given the tokens before it; raises `ScorerFailed` if the
        function raises."""
        given = await asyncio.to_thread(self._called, token_ids)
        return given.tolist() if hasattr(given, "tolist") else given  # type: ignore[no-any-return]

    def _called(self, argument: object) -> Any:
        """Call the function; raises `ScorerFailed`, with file and line, if it raises."""
        try:
            return self._function(argument)
        except BaseException as error:  # noqa: BLE001 - a user's code may raise anything, CancelledError too
            raise ScorerFailed(Failure.RAISED, describe_error(error)) from None
