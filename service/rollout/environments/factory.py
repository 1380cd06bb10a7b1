"""The environments of a run, made as configured: by the row's class, with its options, isolated or not."""

from __future__ import annotations

import inspect
import json
from asyncio import Semaphore
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from service.config.rollout import EnvConfig
from service.errors import UserError
from service.rollout.environment import Environment, Task
from service.rollout.environments.registry import Options, make_environment
from service.rollout.isolation import Processes, task_as_json


class Environments:
    """Makes one environment a trajectory."""

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        isolated = config.isolation == "process"
        self._room = Semaphore(config.max_processes) if isolated else None
        self._processes = Processes(config.max_observation_characters, config.trusted_modules) if isolated else None

    @asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """What an episode is played within: isolated ones wait here, before any deadline runs, for a process."""
        if self._room is None:
            yield
            return
        async with self._room:
            yield

    def make(self, task: Task) -> Environment:
        """A fresh environment for one trajectory of the task; a row without a class means the configured one."""
        name = task.env_class or self._config.name
        if self._processes is not None:
            return self._processes.make_environment(name, self._options(name))
        return make_environment(name, self._options(name), self._config.trusted_modules)

    async def close(self) -> None:
        """End the processes of isolated environments."""
        if self._processes is not None:
            await self._processes.close()

    def _options(self, name: str) -> Options:
        return self._config.options if name == self._config.name else self._config.class_options.get(name, {})


def check_environments(config: EnvConfig, tasks: Sequence[Task], path: Path) -> None:
    """See at the start that every environment that the rows of `path` need can be made, and takes its rows.

    Raises:
        UserError: one cannot or does not; the message names the first row that it happens with.
    """
    first = {task.env_class or config.name: row for row, task in reversed(list(enumerate(tasks)))}
    making = Environments(config.model_copy(update={"isolation": "none"}))
    examples = {}
    for name, row in first.items():
        try:
            examples[name] = making.make(tasks[row])
            _refuse_half(examples[name], name)
        except UserError as error:
            raise UserError(
                f"{error} (first needed by row {row}, {tasks[row].uid})" if name != config.name else str(error)
            ) from error
    for row, task in enumerate(tasks):
        name = task.env_class or config.name
        place = f"dataset {path}, row {row}"
        if config.isolation == "process":
            _refuse_no_json(task, place)
        _refuse_row(examples[name], name, task, place)


def _refuse_no_json(task: Task, row: str) -> None:
    try:
        json.dumps(task_as_json(task))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{row}: it cannot be sent to an environment's own process (env.isolation) as JSON: {error}"
        ) from error


def _refuse_row(environment: Environment, name: str, task: Task, row: str) -> None:
    check = getattr(environment, "check_task", None)
    if check is None:
        return
    try:
        check(task)
    except (Exception, SystemExit) as error:
        # An environment of a user's own may raise anything.
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{row}: the environment {name!r} cannot play it: {reason}") from error


def _refuse_half(environment: Environment, name: str) -> None:
    for method in ("reset", "step", "close"):
        if not inspect.iscoroutinefunction(getattr(environment, method, None)):
            raise UserError(f"env.name: the environment {name!r} needs a method `async def {method}`; see docs/own.md")
