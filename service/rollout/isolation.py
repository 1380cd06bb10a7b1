"""Runs environments in child processes. A process serves one episode at a time, and is then reused."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from service.rollout.child_main import serve_child
from service.rollout.child_process import ChildProcess, ChildProcesses
from service.rollout.environment import Environment, Message, StepResult, Task
from service.rollout.environments.registry import Options, make_environment

BYTES_PER_CHARACTER = 6
"""Maximum bytes that one character of an observation takes in JSON (`\\u0000`)."""
ROOM = 1 << 16
"""Maximum bytes of an answer, without the observation in it."""


def environment_processes(max_observation_characters: int) -> ChildProcesses:
    """The pool of child processes for the isolated environments of one generator."""
    return ChildProcesses("service.rollout.isolation", max_observation_characters * BYTES_PER_CHARACTER + ROOM)


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
            task |= {"prompt": tuple(task["prompt"]), "tools": tuple(task["tools"])}  # JSON has lists for tuples
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
