"""Environments in processes of their own: one that blocks, crashes or floods takes nobody along.

    agent loop --JSON line--> process: reset / step / close --JSON line--> agent loop

A process serves one episode at a time and is used again for the next one. Whoever waits no longer for an answer
(deadline, cancelled trajectory) ends the process; so does the end of the agent loop's own process, which closes stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from service.rollout.environment import Message, OversizedOutput, StepResult, Task
from service.rollout.environments.registry import Options

BYTES_PER_CHARACTER = 6
"""A character of an observation takes at most this many bytes of JSON (`\\u0000`)."""
ROOM = 1 << 16
"""Bytes of an answer beside its observation."""


class EnvironmentDied(Exception):
    """The environment's process ended before it answered."""


class EnvironmentRaised(Exception):
    """What the environment raised in its process, as text."""


class Processes:
    """The processes of one generator: idle ones wait for the next episode."""

    def __init__(self, max_observation_characters: int, trusted_modules: Sequence[str]) -> None:
        self._limit = max_observation_characters * BYTES_PER_CHARACTER + ROOM
        self._trusted_modules = tuple(trusted_modules)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._closed = False

    def make_environment(self, name: str, options: Options) -> IsolatedEnvironment:
        """An environment whose episode runs in one of the processes."""
        return IsolatedEnvironment(self, {"name": name, "options": dict(options), "trusted": self._trusted_modules})

    async def take(self) -> Worker:
        """An idle process, or else a new one."""
        self._all = {worker for worker in self._all if not worker.is_gone}
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
        worker = await Worker.start(self._limit)
        self._all.add(worker)
        if self._closed:
            worker.kill()
        return worker

    def give_back(self, worker: Worker) -> None:
        """The episode is over; a process that still lives waits for the next one."""
        if worker.alive:
            self._idle.append(worker)

    async def close(self) -> None:
        """End all processes, and those that are being started right now."""
        self._closed = True
        for worker in self._all:
            worker.kill()
        await asyncio.gather(*(worker.ended() for worker in self._all))
        self._all.clear()
        self._idle.clear()


class Worker:
    """One process, from the outside."""

    def __init__(self, process: asyncio.subprocess.Process, limit: int) -> None:
        self._process = process
        self._limit = limit
        self._broken = False
        self._asked = 0

    @staticmethod
    async def start(limit: int) -> Worker:
        """Start a process; it can import what this one can."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "service.rollout.isolated",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            limit=limit,
            start_new_session=True,
        )
        return Worker(process, limit)

    @property
    def alive(self) -> bool:
        """It can take another request."""
        return not self._broken and self._process.returncode is None

    @property
    def is_gone(self) -> bool:
        """The process has ended, and the system knows it no more."""
        return self._process.returncode is not None

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """One request and its answer; if that does not come, or nobody waits for it, the process ends."""
        try:
            return await self._ask(request)
        except EnvironmentRaised:
            raise
        except BaseException:
            self.kill()
            raise

    async def _ask(self, request: Mapping[str, Any]) -> Any:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        line = b""
        try:
            self._asked += 1
            self._process.stdin.write(json.dumps({**request, "number": self._asked}).encode() + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        except ValueError as error:  # what StreamReader.readline makes of a line beyond its limit
            raise OversizedOutput(f"more than {self._limit} bytes at once") from error
        except (BrokenPipeError, ConnectionResetError):
            pass  # the process is gone; its exit code below says more
        if not line.endswith(b"\n"):
            code = await self._process.wait()
            self._kill_group()  # what it started outlives it
            raise EnvironmentDied(f"its process ended with code {code}")
        answer = json.loads(line)
        if answer["number"] != self._asked:
            raise EnvironmentDied("its process is out of step: it answered an earlier request again")
        if "raised" in answer:
            raise EnvironmentRaised(answer["raised"])
        return answer["returned"]

    def kill(self) -> None:
        """End the process and those that it started."""
        self._broken = True
        if self._process.returncode is None:
            self._kill_group()

    def _kill_group(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # all of it ended by itself in the meantime

    async def ended(self) -> None:
        """Wait until the process is gone."""
        await self._process.wait()


class IsolatedEnvironment:
    """An environment whose episode runs in another process."""

    def __init__(self, processes: Processes, make: Mapping[str, Any]) -> None:
        self._processes = processes
        self._make = make
        self._worker: Worker | None = None

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Take a process and begin the episode in it."""
        self._worker = await self._processes.take()
        messages: list[Message] = await self._worker.ask(
            {"verb": "reset", "make": self._make, "task": task_as_json(task), "seed": seed}
        )
        return messages

    async def step(self, text: str) -> StepResult:
        """Ask the process."""
        if self._worker is None:
            raise RuntimeError("step before reset")
        return StepResult(**await self._worker.ask({"verb": "step", "text": text}))

    async def close(self) -> None:
        """End the episode and give the process back."""
        if self._worker is None:
            return
        worker, self._worker = self._worker, None
        try:
            if worker.alive:
                await worker.ask({"verb": "close"})
        finally:
            self._processes.give_back(worker)


def task_as_json(task: Task) -> dict[str, Any]:
    """A task as an object that `Task(**object)` reads back."""
    return {
        "uid": task.uid,
        "prompt": list(task.prompt),
        "env_class": task.env_class,
        "reward_spec": dict(task.reward_spec),
        "extra_info": dict(task.extra_info),
        "tools": list(task.tools),
        "temperature": task.temperature,
    }
