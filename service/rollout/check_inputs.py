"""Checks before a run starts that the configured environments can be made and accept their rows."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path

from service.config.rollout import AGENT, DataConfig, EnvConfig
from service.errors import UserError
from service.files import matching
from service.rollout.environment import Agent, Environment, Task
from service.rollout.environments.registry import SyntheticFunction, make_environment, synthetic_data
from service.rollout.factory import Environments
from service.rollout.prompts.dataset import tasks_of
from service.rollout.prompts.files import read_published
from service.rollout.prompts.rows import row_place
from service.user_code import import_object

SYNTHETIC = Path("made")
"""Stands for the file of rows in error messages about synthetic rows, which have no file."""


def check_inputs(
    env: EnvConfig, data: DataConfig, seed: int, has_endpoint: bool, functions: Collection[SyntheticFunction]
) -> None:
    """Make every configured environment and read every dataset that exists.

    `has_endpoint`: whether agents can call the policy. `functions`: functions that a generator of synthetic data must
    have in addition to `rows`.

    Raises:
        UserError: an environment is unknown, is not trusted or refuses its options, or a row of a dataset is malformed.
    """
    if env.name == AGENT:
        if isinstance(env.score, str) and not callable(import_object("env.score", env.score)[1]):
            raise UserError(f"env.score: {env.score} is no function")
    elif hasattr(make_environment(env.name, env.options, env.trusted_modules), "play") and not has_endpoint:
        raise UserError(f"agents: the environment {env.name!r} calls the policy over HTTP; add agents={{}}")
    rows: list[SyntheticFunction] = [] if data.make_rows is None and data.eval_make_rows is None else ["rows"]
    for function in (*rows, *functions):
        synthetic_data(env.name, env.trusted_modules, function)
    for path in (data.train, *(part.path for part in data.mixture.values()), *data.eval.values()):
        if path is not None and any(file.exists() for file in matching(path)):
            check_environments(env, tasks_of(read_published(path, data.columns), path), path)
    if data.make_rows is not None:
        made = synthetic_data(env.name, env.trusted_modules, "rows")(1, seed)
        check_environments(env, tasks_of(made, SYNTHETIC), SYNTHETIC)


def check_environments(config: EnvConfig, tasks: Sequence[Task], path: Path) -> None:
    """Make each environment that a row of the dataset `path` names. If the environment has the method `check_task`,
    call it with each row that names this environment.

    Raises:
        UserError: an environment cannot be made or refuses a row; the message names the first such row.
    """
    factory = Environments(config.model_copy(update={"isolation": "none"}))
    made: dict[str, Environment | Agent | None] = {AGENT: None}  # the settings of a command were checked before
    for row, task in enumerate(tasks):
        name = task.env_class or config.name
        try:
            if name not in made:
                made[name] = factory.make(task)
                _refuse_missing_methods(made[name], name, config)
        except UserError as error:
            if name == config.name:
                raise
            raise UserError(f"{error} (first needed by row {row}, {task.uid})") from error
        columns = (*task.extra_info.items(), *asdict(task).items()) if config.isolation == "process" else ()
        for column, value in columns:  # the columns in `extra_info` come first
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                why = f"it cannot be sent to an environment's own process (env.isolation) as JSON: {error}"
                raise UserError(f"{row_place(path, row)}, column {column}: {why}") from error
        try:
            getattr(made[name], "check_task", lambda task: None)(task)
        except (Exception, SystemExit) as error:  # a user's `check_task` may raise anything
            reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{row_place(path, row)}: the environment {name!r} cannot play it: {reason}") from error


def _refuse_missing_methods(environment: object, name: str, config: EnvConfig) -> None:
    """Refuse a class that is no environment (it lacks `reset` or `step`) and no agent (it lacks `play`)."""
    is_agent = hasattr(environment, "play")
    if is_agent and config.isolation == "process":
        raise UserError(f"env.isolation: {name!r} is an agent, which cannot run in a process of its own; use none")
    for method in () if is_agent else ("reset", "step", "close"):
        if not inspect.iscoroutinefunction(getattr(environment, method, None)):
            raise UserError(f"env.name: the environment {name!r} needs a method `async def {method}`; see docs/own.md")
    if inspect.iscoroutinefunction(getattr(environment, "check_task", None)):
        raise UserError(f"env.name: check_task of {name!r} is not awaited; write `def check_task`, without async")
