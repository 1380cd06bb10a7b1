"""Makes the environment or the agent of each trajectory, according to the row's `env_class` and the configuration.

With `env.isolation: process`, environments run in child processes whose main program is this module. A process serves
one episode after the other.
"""

from __future__ import annotations

import os
import sys
from asyncio import Semaphore
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, Protocol

from service.config.rollout import AGENT, EnvConfig
from service.rollout.child_main import serve_child
from service.rollout.child_process import ChildProcess, ChildProcesses
from service.rollout.engine import MAX_OBSERVATION_CHARACTERS
from service.rollout.environment import Agent, Environment, Message, StepResult, Task
from service.rollout.environments.registry import Options, environment_class, make_environment

BYTES_PER_CHARACTER = 6
"""Maximum bytes that one character of an observation takes in JSON (`\\u0000`)."""
ROOM = 1 << 16
"""Maximum bytes of an answer, without the observation in it."""


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
        """Held during an episode. If each episode has a process, this is a semaphore. An episode waits for it before
        its deadlines start."""
        self._processes = environment_processes(MAX_OBSERVATION_CHARACTERS) if isolated else None

    def make(self, task: Task) -> Environment | Agent:
        """Make an environment or agent for one trajectory of the task. If `env_class` is empty, use the configured
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
        """True if this class is an agent that can continue a session in another generator: it has `resume`."""
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


def environment_processes(max_observation_characters: int) -> ChildProcesses:
    """The pool of child processes for the isolated environments of one generator."""
    return ChildProcesses("service.rollout.factory", max_observation_characters * BYTES_PER_CHARACTER + ROOM)


class IsolatedEnvironment:
    """An environment whose code runs in a child process."""

    def __init__(self, processes: ChildProcesses, name: str, options: Options, trusted_modules: Sequence[str]) -> None:
        self._processes = processes
        self._make = {"name": name, "options": dict(options), "trusted": tuple(trusted_modules)}
        self._process: ChildProcess | None = None

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Take a process from the pool and begin the episode in it."""
        self._process = await self._processes.take()
        request = {"verb": "reset", "make": self._make, "task": asdict(task), "seed": seed}
        messages: list[Message] = await self._process.ask(request)
        return messages

    async def step(self, text: str) -> StepResult:
        """Call the environment's `step` in its process."""
        return StepResult(**await self._asked({"verb": "step", "text": text}))

    async def _asked(self, request: Mapping[str, Any]) -> Any:
        if self._process is None:
            raise RuntimeError(f"{request['verb']} before reset")
        return await self._process.ask(request)

    async def close(self) -> None:
        """End the episode and return the process to the pool."""
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            if process.usable:
                await process.ask({"verb": "close"})
        finally:
            self._processes.give_back(process)


class _Episodes:
    """Serves one episode after the other, inside the child process."""

    def __init__(self) -> None:
        self._environment: Environment | None = None

    async def answer(self, request: Mapping[str, Any]) -> Any:
        """Call the method of the environment that the request names."""
        if request["verb"] == "reset":
            self._environment = None
            os.dup2(2, 1)  # an earlier environment may have closed stdout
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - until the next episode
            make, task = request["make"], request["task"]
            task |= {"prompt": tuple(task["prompt"]), "tools": tuple(task["tools"])}  # JSON made them lists
            self._environment = make_environment(make["name"], make["options"], make["trusted"])
            return list(await self._environment.reset(Task(**task), request["seed"]))
        if self._environment is None:
            raise RuntimeError(f"{request['verb']} before reset")
        if request["verb"] == "step":
            return (await self._environment.step(request["text"]))._asdict()
        environment, self._environment = self._environment, None
        return await environment.close()


def main() -> None:
    """Serve episodes one after the other until stdin closes."""
    serve_child(_Episodes().answer)
