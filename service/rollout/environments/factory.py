"""The environments of a run, made as configured: by the row's class, with its options, isolated or not."""

from __future__ import annotations

from asyncio import Semaphore
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.config.rollout import EnvConfig
from service.rollout.environment import Environment, Task
from service.rollout.environments.registry import Options, make_environment
from service.rollout.isolation import Processes


class Environments:
    """Makes one environment per trajectory."""

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        isolated = config.isolation == "process"
        self._room = Semaphore(config.max_processes) if isolated else None
        self._processes = Processes(config.max_observation_characters, config.trusted_modules) if isolated else None

    @asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """Hold a place for one episode: isolated episodes wait here for a process, before any deadline starts."""
        if self._room is None:
            yield
            return
        async with self._room:
            yield

    def make(self, task: Task) -> Environment:
        """A new environment for one trajectory of the task; an empty `env_class` means the configured one."""
        name = task.env_class or self._config.name
        if self._processes is not None:
            return self._processes.environment(name, self._options(name))
        return make_environment(name, self._options(name), self._config.trusted_modules)

    async def close(self) -> None:
        """End the processes of isolated environments."""
        if self._processes is not None:
            await self._processes.close()

    def _options(self, name: str) -> Options:
        return self._config.options if name == self._config.name else self._config.class_options.get(name, {})
