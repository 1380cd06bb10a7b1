"""Makes the environment or the agent of each trajectory, according to the row's `env_class` and the configuration."""

from __future__ import annotations

from asyncio import Semaphore
from contextlib import nullcontext
from typing import Protocol

from service.config.rollout import AGENT, EnvConfig
from service.rollout.environment import Agent, Environment, Task
from service.rollout.environments.registry import environment_class, make_environment
from service.rollout.isolation import IsolatedEnvironment, environment_processes
from service.rollout.limits import MAX_OBSERVATION_CHARACTERS


class AgentMaker(Protocol):
    """Makes agents that run the command `env.command`. `Environments` gets an `AgentMaker` only if commands may play
    tasks."""

    def make(self) -> Agent:
        """Make an agent for one trajectory."""

    async def close(self) -> None:
        """End all commands that agents started."""


class Environments:
    """Makes the environment or the agent of each trajectory."""

    def __init__(self, config: EnvConfig, commands: AgentMaker | None = None) -> None:
        """`commands`: makes the agents of `env.command`; None if no task is played by a command."""
        self._config = config
        self._commands = commands
        isolated = config.isolation == "process"
        self.room = Semaphore(config.max_processes) if isolated or config.name == AGENT else nullcontext()
        """Held during an episode. If episodes have their own processes, this is a semaphore, for which an episode waits
        before its deadlines start."""
        self._processes = environment_processes(MAX_OBSERVATION_CHARACTERS) if isolated else None

    def make(self, task: Task) -> Environment | Agent:
        """Make an environment or agent for one trajectory of the task. An empty `env_class` means the configured
        environment."""
        config = self._config
        name = task.env_class or config.name
        if name == AGENT:
            if self._commands is None:
                raise ValueError("env.name: this process has no room of agents to run a command")
            return self._commands.make()
        options = config.options if name == config.name else config.class_options.get(name, {})
        if self._processes is not None:
            return IsolatedEnvironment(self._processes, name, options, config.trusted_modules)
        return make_environment(name, options, config.trusted_modules)

    def is_agent(self, task: Task) -> bool:
        """True if the task is played by an agent that calls the policy itself."""
        name = task.env_class or self._config.name
        if name == AGENT or self._processes is not None:
            return name == AGENT
        return hasattr(environment_class(name, self._config.trusted_modules), "play")

    def resumes(self, env_class: str = "") -> bool:
        """True if an agent of this class continues its sessions in a restarted generator: it has `resume`."""
        name = env_class or self._config.name
        if name == AGENT or self._processes is not None:
            return False
        return hasattr(environment_class(name, self._config.trusted_modules), "resume")

    async def close(self) -> None:
        """End the child processes of environments and commands."""
        if self._commands is not None:
            await self._commands.close()
        if self._processes is not None:
            await self._processes.close()
