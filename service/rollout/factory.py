"""The environments of a run, made as configured: by the row's class, with its options, isolated or not."""

from __future__ import annotations

import inspect
from asyncio import Semaphore
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from service.config.rollout import EnvConfig
from service.errors import UserError
from service.rollout.environment import Environment, Task
from service.rollout.environments import Options, environment
from service.rollout.isolation import Processes


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
            return self._processes.environment(name, self._options(name))
        return environment(name, self._options(name), self._config.trusted_modules)

    async def close(self) -> None:
        """End the processes of isolated environments."""
        if self._processes is not None:
            await self._processes.close()

    def _options(self, name: str) -> Options:
        return self._config.options if name == self._config.name else self._config.class_options.get(name, {})


def check_environments(config: EnvConfig, tasks: Sequence[Task]) -> None:
    """See at the start that every environment that the tasks need can be made.

    Raises:
        UserError: one cannot; the message names the first row that needs it.
    """
    first = {task.env_class or config.name: row for row, task in reversed(list(enumerate(tasks)))}
    making = Environments(config.model_copy(update={"isolation": "none"}))
    for name, row in first.items():
        try:
            _refuse_half(making.make(tasks[row]), name)
        except UserError as error:
            raise UserError(
                f"{error} (first needed by row {row}, {tasks[row].uid})" if name != config.name else str(error)
            ) from error


def _refuse_half(environment: Environment, name: str) -> None:
    for method in ("reset", "step", "close"):
        if not inspect.iscoroutinefunction(getattr(environment, method, None)):
            raise UserError(f"env.name: the environment {name!r} needs a method `async def {method}`; see docs/own.md")
